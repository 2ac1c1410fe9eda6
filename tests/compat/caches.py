"""What each era of vLLM registers for a spec, over memory of our own: the shapes its attention backends and runner make."""

from math import prod
from types import ModuleType
from typing import Any

import torch

from tests.compat.specs import BLOCK_SIZE, NUM_BLOCKS


def planned_caches(interface: ModuleType, layers: dict[str, Any], layout: str, kernel_blocks: dict[str, int]) -> tuple[list[Any], dict]:
    """From 0.29: the release's own `create_kv_cache_views`, each layer in its own region of one allocation.

    `layers` names a group's spec for each layer; a layer that lays its pages out itself gets the whole allocation.
    """
    size = sum(NUM_BLOCKS * spec.page_size_bytes for spec in layers.values())
    memory = torch.zeros(size, dtype=torch.int8)
    tensors, caches, offset = [], {}, 0
    for name, spec in layers.items():
        page = spec.page_size_bytes
        tensor = interface.KVCacheTensor(size, [name], layer_stride=NUM_BLOCKS * page, block_stride=page, offset=offset)
        tensors.append(tensor)
        if getattr(spec, "has_layer_views", True):
            named = interface.KVCacheLayout[layout]
            views = interface.create_kv_cache_views(memory, spec, NUM_BLOCKS, named, tensor, kernel_blocks.get(name))
            caches[name] = views[0]
        else:
            caches[name] = memory
        offset += NUM_BLOCKS * page
    return tensors, caches


def era_cache(era: str, kind: str, spec: Any, layout: str, kernel_block: int | None = None, memory: torch.Tensor | None = None) -> Any:
    """Up to 0.28: one layer's registered value in eras B to E, over memory of its own or `memory`."""
    page = spec.page_size_bytes
    memory = torch.zeros(NUM_BLOCKS * page, dtype=torch.int8) if memory is None else memory
    if kind == "mamba":
        return _states(era, spec, memory)
    kernel_block = kernel_block or BLOCK_SIZE
    states = kernel_block // getattr(spec, "compress_ratio", 1)
    pages = NUM_BLOCKS * BLOCK_SIZE // kernel_block
    typed = memory.view(spec.dtype)
    if "mla" in kind:
        kernel_pages = BLOCK_SIZE // kernel_block
        content = spec.real_page_size_bytes // (kernel_pages * states * spec.dtype.itemsize)
        return typed.as_strided((pages, states, content), (page // (kernel_pages * spec.dtype.itemsize), content, 1))
    heads = spec.num_kv_heads
    if getattr(spec, "tq_slot_size", 0):
        return _ordered(typed, (pages, states, heads, spec.tq_slot_size), layout)
    if era == "B":
        return _ordered(typed, (2, pages, states, heads, typed.numel() // (2 * pages * states * heads)), layout)
    if era == "C":
        return _ordered(typed, (pages, 2, states, heads, typed.numel() // (2 * pages * states * heads)), layout)
    return _ordered(typed, (pages, states, heads, typed.numel() // (pages * states * heads)), layout).transpose(1, 2)


def _ordered(memory: torch.Tensor, shape: tuple[int, ...], layout: str) -> torch.Tensor:
    """A view `[…, s, H, C]` of memory that keeps slots outside heads (NHD) or heads outside slots (HND)."""
    *outer, slots, heads, content = shape
    if layout == "HND":
        return memory.view(*outer, heads, slots, content).transpose(-3, -2)
    return memory.view(shape)


def _states(era: str, spec: Any, memory: torch.Tensor) -> Any:
    """A list of states of one padded page, or from era E the page as one int8 tensor, padding included."""
    page = spec.page_size_bytes
    if era == "E":
        return memory.view(NUM_BLOCKS, 1, 1, page)
    states, offset = [], 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        dense = torch.empty(shape, device="meta").stride()
        states.append(memory.view(dtype).as_strided((NUM_BLOCKS, *shape), (page // dtype.itemsize, *dense), offset // dtype.itemsize))
        offset += prod(shape) * dtype.itemsize
    return states
