"""The vLLM connector: LMCache's own, with registration replaced by the pipeline and refusals made survivable.

    --kv-transfer-config '{"kv_connector": "KVRegConnector", "kv_connector_module_path": "orchestrator.connector",
                           "kv_role": "kv_both", "kv_connector_extra_config": {"lmcache.mp.port": 5555}}'

Every setting of LMCache's connector keeps its meaning; kvreg's own are `kvreg.*` (orchestrator/config.py).
"""

from orchestrator.connector.requirements import check_lmcache

check_lmcache()

from orchestrator.connector.kvreg import KVRegConnector  # noqa: E402 - only after the check

__all__ = ["KVRegConnector"]
