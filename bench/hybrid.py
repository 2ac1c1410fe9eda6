"""A hybrid model of any depth as vLLM hands it over: its own specs and config, three layers of state to one of attention.

Importing this imports much of vLLM.
"""

from math import prod

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

BLOCKS, TOKENS, KERNEL, HEADS, HEAD_SIZE = 4, 64, 16, 2, 16
STATES, DTYPES = ((3, 100), (2, 16, 16)), (torch.bfloat16, torch.float32)
STATE_BYTES = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(STATES, DTYPES, strict=True))
GROUPS = 4


def hybrid(layers: int) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """`layers` layers in four groups that overlay each other, layout LBNHC: int8 `[NB,1,1,C]` states, attention `[P,H,s,2D]`.

    Attention is paged four kernel pages to a block. One allocation, never written, so that its pages take no memory.
    """
    attention = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16)
    page = attention.page_size_bytes
    state = MambaSpec(block_size=TOKENS, shapes=STATES, dtypes=DTYPES, page_size_padded=page, mamba_cache_mode="align")
    memory = torch.empty(layers // GROUPS * BLOCKS * page, dtype=torch.int8)
    names: list[list[str]] = [[] for _ in range(GROUPS)]
    caches = {}
    for layer in range(layers):
        group, place = layer % GROUPS, layer // GROUPS * BLOCKS * page
        is_attention = group == GROUPS - 1
        name = f"model.layers.{layer}.{'self_attn.attn' if is_attention else 'linear_attn'}"
        names[group].append(name)
        if is_attention:
            pages = memory[place : place + BLOCKS * page].view(torch.bfloat16).view(BLOCKS * TOKENS // KERNEL, KERNEL, HEADS, -1)
            caches[name] = pages.transpose(1, 2)
        else:
            caches[name] = memory.as_strided((BLOCKS, 1, 1, STATE_BYTES), (page, STATE_BYTES, STATE_BYTES, 1), place)
    groups = [KVCacheGroupSpec(members, attention if group == GROUPS - 1 else state) for group, members in enumerate(names)]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups, kv_cache_layout="LBNHC"), caches
