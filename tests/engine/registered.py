"""A connector that keeps the snapshot of what a real worker registers, and does nothing else."""

import os
from pathlib import Path
from typing import Any

from orchestrator import snapshot
from orchestrator.engine.observe import observe
from tests.lmcache.idle import IdleConnector


class Registered(IdleConnector):
    """Writes one snapshot for each worker into the folder `REGISTERED_SNAPSHOTS`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.vllm_config = vllm_config
        self.kv_cache_config = kv_cache_config

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """What would go through the four stages."""
        offer = observe(self.kv_cache_config, kv_caches, vllm_config=self.vllm_config)
        snapshot.write(offer, Path(os.environ["REGISTERED_SNAPSHOTS"]) / f"rank{offer.worker.rank}.json")
