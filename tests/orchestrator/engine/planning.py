"""The installed vLLM's own planning and allocation, for specs of our choosing: no model, no weights, real objects and memory.

Importing this imports much of vLLM; the `planning` fixture does it when a test asks.
"""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

__all__ = ["allocate", "configs", "interface", "vllm_config"]

MEMORY_BYTES = 1 << 30


def vllm_config(layout: str, num_blocks: int) -> Any:
    """An engine's configuration whose layout is resolved, with a fixed number of blocks."""
    config = VllmConfig()
    config.cache_config.kv_cache_layout = layout
    config.cache_config.num_gpu_blocks_override = num_blocks
    config.model_config = SimpleNamespace(
        model="planned",
        served_model_name="planned",
        max_model_len=96,
        original_max_model_len=96,
        is_hybrid=False,
        hf_config=SimpleNamespace(model_type="planned"),
    )
    return config


def configs(config: Any, workers: list[dict[str, Any]]) -> list[Any]:
    """Each worker's KVCacheConfig for the layers it has, as the engine core plans and hands them over."""
    planned = get_kv_cache_configs(config, workers, [MEMORY_BYTES] * len(workers))
    for worker in planned:
        worker.kv_cache_layout = config.cache_config.kv_cache_layout
    return planned


def allocate(planned: Any, kernel_block: int | None = None) -> dict[str, torch.Tensor]:
    """The worker's memory and every layer's tensor; attention is split into kernel blocks of `kernel_block` tokens."""
    sizes = []
    for group in planned.kv_cache_groups:
        spec = next(iter(interface.iter_layer_specs(group.kv_cache_spec)))
        split = kernel_block is not None and isinstance(spec, interface.AttentionSpec)
        sizes.append(kernel_block if split else group.kv_cache_spec.block_size)
    return allocate_kv_cache(planned, torch.device("cpu"), KVCacheLayout[planned.kv_cache_layout], sizes)
