"""Entry point ``vllm.general_plugins``: makes the connector's name known to vLLM."""

from __future__ import annotations

CONNECTOR = "LMCacheECConnector"


def register() -> None:
    """Register the connector with vLLM's factory; nothing else, and any number of times.

    vLLM calls this in every process, and may do so more than once. The connector's module is
    imported only when a server asks for it by name.
    """
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    # vLLM refuses a second registration of a name, and has no other way to ask.
    if CONNECTOR not in ECConnectorFactory._registry:  # noqa: SLF001
        ECConnectorFactory.register_connector(CONNECTOR, "lmcache_ec.vllm.connector", CONNECTOR)
