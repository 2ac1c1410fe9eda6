"""A connector of which one worker is refused: what its engine hands it lacks a layer."""

from typing import Any

from orchestrator.connector import KVRegConnector


class OneRefused(KVRegConnector):
    """kvreg's connector; the last worker never sees the first layer's cache."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register all, or on the last worker all but one."""
        parallel = self._vllm_config.parallel_config
        last = parallel.world_size > 1 and parallel.rank == parallel.world_size - 1
        super().register_kv_caches(dict(list(kv_caches.items())[1:]) if last else kv_caches)
