"""observe: what one vLLM worker hands over, as an Offer. Metadata only: no byte of a tensor is read, no device waited for."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from orchestrator.engine import compat
from stages.model import CacheTensor, LayerCache, LeafSpec, Offer, OfferedGroup, Worker

RegisteredCache: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
"""What vLLM registers for a layer: a tensor, or (Mamba up to 0.26) a list of the states of one page."""


def observe(
    kv_cache_config: compat.KVCacheConfig,
    kv_caches: Mapping[str, RegisteredCache],
    *,
    layout: str | None = None,
    vllm_config: Any | None = None,
    dcp_size: int | None = None,
    model_name: str | None = None,
    worker: Worker | None = None,
    chunk_size_tokens: int | None = None,
) -> Offer:
    """The offer of one worker: its `KVCacheConfig` and the `kv_caches` of `register_kv_caches`, in their order.

    Layout, DCP size, model name and worker are read from `vllm_config` where they are not given; without either there
    is no layout (the strides decide), one DCP rank and one worker. Raises EngineUnsupported for vLLM before 0.22.
    """
    caches = {name: _cache(registered) for name, registered in kv_caches.items()}
    tensors = [part.tensor for cache in caches.values() for part in cache.tensors]
    if layout is None:
        layout = compat.layout_name(kv_cache_config, vllm_config, on_cpu=any(tensor.device.type == "cpu" for tensor in tensors))
    if vllm_config is not None:
        dcp_size = compat.dcp_size(vllm_config) if dcp_size is None else dcp_size
        model_name = compat.model_name(vllm_config) if model_name is None else model_name
        worker = compat.worker(vllm_config) if worker is None else worker
    equal: dict[LeafSpec, LeafSpec] = {}
    return Offer(
        engine=compat.engine(),
        groups=tuple(_group(kv_cache_config, group, equal) for group in kv_cache_config.kv_cache_groups),
        caches=caches,
        layout=layout,
        dcp_size=dcp_size or 1,
        chunk_size_tokens=chunk_size_tokens,
        model_name=model_name or "",
        worker=worker or Worker(),
    )


def leaf_spec(spec: Any) -> LeafSpec:
    """One layer's vLLM spec (never a group's wrapper) as a value."""
    return LeafSpec(
        kind=compat.kind(spec),
        block_size=int(spec.block_size),
        page_size_bytes=int(spec.page_size_bytes),
        num_states=compat.num_states(spec),
        unpadded_page_size_bytes=compat.unpadded_page_size_bytes(spec),
        tokens_per_state=compat.tokens_per_state(spec),
        sliding_window_tokens=compat.sliding_window_tokens(spec),
        mamba_cache_mode=compat.mamba_cache_mode(spec),
        prefix_cacheable=compat.prefix_cacheable(spec),
        dcp_sharded=compat.dcp_sharded(spec),
        described=_described(spec),
    )


def _group(config: compat.KVCacheConfig, group: compat.Group, equal: dict[LeafSpec, LeafSpec]) -> OfferedGroup:
    """A group as offered. `equal` holds one value for all equal specs: the stages look into layers once for each spec."""
    specs = compat.leaf_specs(group)
    made = {key: equal.setdefault(leaf := leaf_spec(spec), leaf) for key, spec in {id(spec): spec for spec in specs.values()}.items()}
    return OfferedGroup(
        layer_names=tuple(group.layer_names),
        num_blocks=compat.num_blocks(config, group),
        specs={name: made[id(spec)] for name, spec in specs.items()},
        block_size=int(group.kv_cache_spec.block_size),
        transferable=compat.transferable(group),
        host_resident=compat.host_resident(group),
    )


def _cache(registered: RegisteredCache) -> LayerCache:
    if isinstance(registered, torch.Tensor):
        return LayerCache((_cache_tensor(registered),))
    return LayerCache(tuple(map(_cache_tensor, registered)), listed=True)


def _cache_tensor(tensor: torch.Tensor) -> CacheTensor:
    """The tensor with its memory's name: where the storage starts, or, if it has no address (`meta`), which object it is."""
    storage = tensor.untyped_storage()
    place = f"{storage.data_ptr():#x}" if storage.data_ptr() else f"unplaced-{storage._cdata:#x}"
    return CacheTensor(tensor, f"{tensor.device}:{place}", storage.nbytes())


def _described(spec: Any) -> dict[str, object]:
    """What no stage decides by, in the words of a snapshot's spec."""
    described: dict[str, object] = {"class": type(spec).__name__}
    for name in ("num_kv_heads", "head_size", "attention_chunk_size"):
        if getattr(spec, name, None) is not None:
            described[name] = int(getattr(spec, name))
    if hasattr(spec, "dtype"):
        described["dtype"] = _dtype_name(spec.dtype)
    if hasattr(spec, "kv_quant_mode") and spec.kv_quant_mode:
        described["kv_quant_mode"] = spec.kv_quant_mode.name.lower()
    if hasattr(spec, "shapes"):
        described["state_shapes"] = [list(map(int, shape)) for shape in spec.shapes]
        described["state_dtypes"] = [_dtype_name(dtype) for dtype in spec.dtypes]
    return described


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
