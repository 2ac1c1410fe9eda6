"""Imported before an engine is made: its attention backend pages by a smaller kernel block.

The kernel block is `KERNEL_BLOCK_SIZE` tokens, an environment variable; the CPU backend on its own always pages by the
engine's block, and so nothing on CPU is sub-paged without this.
"""

import os
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

_KERNEL_BLOCK_SIZE = int(os.environ["KERNEL_BLOCK_SIZE"])


def _zero_block_ids(runner: Any, block_ids: list[int]) -> None:
    """Zero the kernel pages of these blocks; the stock runner zeroes page `block_id`, which belongs to another block."""
    num_blocks = runner.kv_cache_config.num_blocks
    for group in runner.kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            cache = runner.compilation_config.static_forward_context[name].kv_cache
            if isinstance(cache, torch.Tensor) and cache.shape[0] > num_blocks:
                pages = cache.shape[0] // num_blocks
                for block_id in block_ids:
                    cache[block_id * pages : (block_id + 1) * pages].zero_()


CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda *_, **__: [_KERNEL_BLOCK_SIZE])
CPUModelRunner._zero_block_ids = _zero_block_ids
