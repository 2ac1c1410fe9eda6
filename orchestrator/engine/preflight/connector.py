"""What vLLM asks of a KV connector's class while it plans, answered as kvreg's own answers; nothing of LMCache is needed.

Planning depends on the connector: one that serves hybrid models keeps their groups apart, and one may ask for a layout.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA


class KVRegConnector(KVConnectorBase_V1, SupportsHMA):
    """Serves hybrid models and asks for no layout, as the connector of the same name does. It is never made."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> None:
        """The layout is vLLM's choice."""
