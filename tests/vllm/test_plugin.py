"""The entry point, as vLLM loads it."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make test` installs it")

from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory


def test_registering_twice_is_registering_once() -> None:
    (plugin,) = entry_points(group="vllm.general_plugins", name="lmcache_ec")
    register = plugin.load()
    register()
    register()
    config = ECTransferConfig(ec_connector="LMCacheECConnector", ec_role="ec_both")
    connector = ECConnectorFactory.get_connector_class(config)
    assert connector.__module__ == "lmcache_ec.vllm.connector"
