"""Entry point ``vllm.general_plugins``: makes the connector's name known to vLLM."""

from __future__ import annotations

import atexit

CONNECTOR = "LMCacheECConnector"


def register() -> None:
    """Register the connector with vLLM's factory, and what gives memory back at the end.

    vLLM calls this in every process, and may do so more than once. The connector's module is
    imported only when a server asks for it by name.
    """
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    # vLLM refuses a second registration of a name, and has no other way to ask.
    if CONNECTOR not in ECConnectorFactory._registry:  # noqa: SLF001
        ECConnectorFactory.register_connector(CONNECTOR, "lmcache_ec.vllm.connector", CONNECTOR)
        atexit.register(give_memory_back)


def give_memory_back() -> None:
    """Remove the memory tier of variables and YAML file, if nobody lives there.

    vLLM kills the processes of its engine before they can leave it: at the end of a script, or of
    a server with the default ``--shutdown-timeout 0``. Its main process outlives them.
    """
    from pathlib import Path

    from lmcache_ec.backends.arena import arena_directory
    from lmcache_ec.backends.holders import remove_if_abandoned
    from lmcache_ec.config import load_ec_engine_config
    from lmcache_ec.errors import ConfigError

    try:
        config = load_ec_engine_config()
    except ConfigError:  # then no connector has started either
        return
    remove_if_abandoned(arena_directory(Path(config.shm_path)))
