"""What vLLM's releases spell differently: one function a fact, each naming the release that changed it.

Spellings are told apart by what an object has, never by a version number: builds from source carry arbitrary ones.
vLLM is imported when a function needs it, so that this room can be imported without it.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from fractions import Fraction
from math import prod
from types import ModuleType
from typing import Any, Protocol

from stages.errors import EngineUnsupported
from stages.model import Engine, Kind, Worker

_KINDS = {kind.value: kind for kind in Kind}


class Group(Protocol):
    """What every release's `KVCacheGroupSpec` has."""

    layer_names: Sequence[str]
    kv_cache_spec: Any


class KVCacheConfig(Protocol):
    """What every release's `KVCacheConfig` has."""

    num_blocks: int
    kv_cache_groups: Sequence[Group]


def engine() -> Engine:
    """The running vLLM's name and version, for logs and snapshots."""
    import vllm

    return Engine("vllm", str(vllm.__version__))


def interface() -> ModuleType:
    """`vllm.v1.kv_cache_interface`. Raises EngineUnsupported before 0.22, where a spec could not say its kind."""
    from vllm.v1 import kv_cache_interface

    module: ModuleType = kv_cache_interface
    if not hasattr(module, "get_kv_cache_spec_kind"):
        raise EngineUnsupported("vLLM", engine().version, "0.22 or newer")
    return module


def leaf_specs(group: Group) -> dict[str, Any]:
    """Each layer's own spec. A UniformTypeKVCacheSpecs is a wrapper: its page is a sum and its kind may hide a mix.

    Pipeline parallelism leaves a rank groups without layers, and a wrapper that still lists other ranks' layers.
    """
    spec = group.kv_cache_spec
    if isinstance(spec, interface().UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in group.layer_names if name in spec.kv_cache_specs}
    return dict.fromkeys(group.layer_names, spec)


def kind(spec: Any) -> Kind:
    """The engine's own verdict on a leaf spec (0.22); a kind that has appeared since is UNKNOWN, which is refused by name."""
    return _KINDS.get(interface().get_kv_cache_spec_kind(spec).value, Kind.UNKNOWN)


def tokens_per_state(spec: Any) -> Fraction:
    """Tokens that one stored state covers; below 1 where a token has several states, and 1 where the engine has no say.

    `compress_ratio`, on MLA specs only, up to 0.28; `tokens_per_state` on every spec from 0.29, which is -1 for
    recurrent state and raises NotImplementedError for pages that their owner lays out itself.
    """
    try:
        declared = getattr(spec, "tokens_per_state", getattr(spec, "compress_ratio", 1))
    except NotImplementedError:
        return Fraction(1)
    return Fraction(declared) if declared > 0 else Fraction(1)


def num_states(spec: Any) -> int:
    """States stored in one block, 1 for recurrent state; from 0.29 the spec says it, before it followed from the ratio.

    A page that its owner lays out itself has no states to count (NotImplementedError); it is taken by tokens.
    """
    if kind(spec) is Kind.MAMBA:
        return 1
    try:
        declared = getattr(spec, "num_states", None)
    except NotImplementedError:
        return int(spec.block_size)
    return int(declared) if declared is not None else max(int(spec.block_size // tokens_per_state(spec)), 1)


def unpadded_page_size_bytes(spec: Any) -> int:
    """Bytes of a block that hold something.

    A spec that declares no padding has none: its page then counts what `real_page_size_bytes` (up to 0.25) left out,
    the scales of per-token-head quantization. `unpadded_page_size_bytes` from 0.26; never on recurrent state.
    """
    if getattr(spec, "page_size_padded", None) is None:
        return int(spec.page_size_bytes)
    if kind(spec) is Kind.MAMBA:
        return sum(prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
    return int(spec.unpadded_page_size_bytes if hasattr(spec, "unpadded_page_size_bytes") else spec.real_page_size_bytes)


def prefix_cacheable(spec: Any) -> bool:
    """False for scratch, whose blocks mean nothing to another request; before 0.29 there was none, and nothing said so."""
    return bool(getattr(spec, "prefix_cacheable", True))


def dcp_sharded(spec: Any) -> bool | None:
    """Whether decode-context-parallel ranks split this layer's tokens; None before 0.31, which did not say."""
    declared = getattr(spec, "dcp_sharded", None)
    return None if declared is None else bool(declared)


def sliding_window_tokens(spec: Any) -> int | None:
    """The attention window in tokens; specs without the field have none, and a full-attention spec may record one."""
    declared = getattr(spec, "sliding_window", None)
    return None if declared is None else int(declared)


def mamba_cache_mode(spec: Any) -> str | None:
    """When recurrent state is kept, by the engine's name ("none", "align", "all"); None on other kinds."""
    declared = getattr(spec, "mamba_cache_mode", None)
    return None if declared is None else str(declared)


def transferable(group: Group) -> bool:
    """False for what is rebuilt from another group after a load; before 0.29 there was no such group."""
    return bool(getattr(group, "enable_kv_transfer", True))


def host_resident(group: Group) -> bool:
    """Whether a group's blocks are in host memory; before 0.30 none was."""
    return bool(getattr(group, "host_resident", False))


def num_blocks(config: KVCacheConfig, group: Group) -> int:
    """Block ids of a group. One number for all, but a host-resident group (0.30) has a pool and a count of its own."""
    host_blocks = getattr(config, "hisparse_host_num_blocks", None)
    return int(host_blocks) if host_resident(group) and host_blocks is not None else config.num_blocks


def layout_name(config: KVCacheConfig, vllm_config: Any | None, *, on_cpu: bool) -> str | None:
    """The engine's name for its layout, or None if it does not say.

    From 0.29 the engine core resolves one of six names; `KVCacheConfig.kv_cache_layout` brings it to a worker, whose
    `CacheConfig` keeps it. Before, NHD or HND is asked of `get_kv_cache_layout()`, which needs a current config and
    may answer NHD on CPU, where attention's pages are always heads first.
    """
    if hasattr(config, "kv_cache_layout"):
        resolved = config.kv_cache_layout or (vllm_config.cache_config.kv_cache_layout if vllm_config is not None else None)
        return None if resolved is None else str(resolved)
    if on_cpu:
        return "HND"
    if vllm_config is None:
        return None
    from vllm.config import get_current_vllm_config_or_none, set_current_vllm_config
    from vllm.v1.attention.backends.utils import get_kv_cache_layout

    with nullcontext() if get_current_vllm_config_or_none() is not None else set_current_vllm_config(vllm_config):
        return str(get_kv_cache_layout())


def dcp_size(vllm_config: Any) -> int:
    """Decode-context-parallel ranks that share a sequence; the same name in all releases."""
    return int(vllm_config.parallel_config.decode_context_parallel_size)


def worker(vllm_config: Any) -> Worker:
    """Which worker of all data-parallel replicas this is, so that no two of one deployment have the same id.

    `data_parallel_index` where a release has it: `data_parallel_rank` is reset to 0 in each replica of a dense model.
    """
    parallel = vllm_config.parallel_config
    replica = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
    return Worker(replica * parallel.world_size + parallel.rank, parallel.data_parallel_size * parallel.world_size)


def model_name(vllm_config: Any) -> str:
    """The name the engine serves its model by, which its own metrics carry; the same name in all releases."""
    served = vllm_config.model_config.served_model_name
    return str(served[0] if isinstance(served, list) else served or vllm_config.model_config.model)
