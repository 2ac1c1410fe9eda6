"""What an LMCache server will make of a plan, found out here: its own grouping, run in the worker on the plan's views.

The server never tells a worker that it refused a registration. What differs from the proof is refused before it is sent.
"""

from collections.abc import Iterator, Sequence

from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.utils import normalize_and_discover_per_layer_formats
from lmcache.v1.kv_layer_groups import KernelGroupInfo, KVLayerGroupsManager
from lmcache.v1.multiprocess.group_view import EngineGroupInfo, engine_group_layer_indices

from orchestrator.backend.lmcache_border import foreign
from stages.errors import Reason, TransferRefused
from stages.model import EngineGroup, Layout, Plan
from stages.pages import width_bytes

_BLOCK_SIZES = (32, 64, 128)
"""Block sizes to try: the engine's CPU kernels page by multiples of 32."""

KV_LAYOUT_NAMES = {Layout.LBNHC: "NHD", Layout.LBHNC: "HND"}
"""LMCache's names for the engine's layouts, where they differ."""


def group_infos(plan: Plan) -> tuple[EngineGroupInfo, ...]:
    """The plan's groups as LMCache's."""
    return tuple(
        EngineGroupInfo(
            engine_group_id=group.engine_group_id,
            layer_indices=group.layer_indices,
            tokens_per_block=group.tokens_per_block,
            sw_size_tokens=group.sw_size_tokens,
            extra_object_group_tag=group.extra_object_group_tag,
            recurrent_state=group.recurrent_state,
        )
        for group in plan.groups
    )


def layout_hints(plan: Plan) -> dict[str, str]:
    """The layout by which every page of the plan was proven, in LMCache's words."""
    return {"kv_layout": KV_LAYOUT_NAMES.get(plan.layout, plan.layout.value)}


def check_reading(plan: Plan, chunk_size_tokens: int) -> None:
    """Run the server's own grouping on the plan's views, and refuse any difference from what was proven."""
    for planned, read in zip(plan.groups, _as_the_server_reads(plan, chunk_size_tokens), strict=True):
        differences = tuple(_differences(plan, planned, read))
        if differences:
            raise TransferRefused(
                Reason.SERVER_DISAGREES,
                {
                    "group": planned.engine_group_id,
                    "layers": planned.layer_names,
                    **{name: f"{one}≠{two}" for name, one, two in differences},
                },
            )
        descriptor = read.shape_desc
        tight = descriptor.bs * descriptor.nh * descriptor.hs
        if plan.layers[0].view.device.type == "cpu" and descriptor.block_stride_elems not in (0, tight):
            raise TransferRefused(
                Reason.PADDED_PAGES_ON_CPU,
                {
                    "group": planned.engine_group_id,
                    "layers": planned.layer_names,
                    "tokens_per_block": planned.tokens_per_block,
                    "copied_bytes": tight * descriptor.element_size,
                    "block_stride_bytes": planned.block_stride_bytes,
                    "geometry": _unpadded_geometry(plan, planned),
                },
            )


def _unpadded_geometry(plan: Plan, padded: EngineGroup) -> str:
    """What to set so that this model's pages have no padding, as far as block sizes decide it.

    A hybrid's block is the least multiple of --block-size whose attention page holds the state, and the state's page is
    padded to that one. It is filled where the state's bytes, shared out among as many slots and rounded up to a copy's
    width, come to the attention's bytes a token.
    """
    layer = plan.layers[padded.layer_indices[0]].layer
    token_bytes, rest = divmod(padded.block_stride_bytes, padded.tokens_per_block)
    if layer.spec.recurrent and not rest:
        for block_size in _BLOCK_SIZES:
            tokens = -(-layer.owned.size_bytes // (token_bytes * block_size)) * block_size
            if width_bytes(layer.owned.size_bytes, tokens, tokens * token_bytes) == token_bytes:
                return f"--block-size {block_size}, for blocks of {tokens} tokens"
    return f"other page sizes: no --block-size of {', '.join(map(str, _BLOCK_SIZES))} fills this model's pages"


def _as_the_server_reads(plan: Plan, chunk_size_tokens: int) -> Sequence[KernelGroupInfo]:
    """The server's kernel groups for this plan. Raises TransferRefused with the server's own words."""
    views, infos = [layer.view for layer in plan.layers], group_infos(plan)

    def read() -> Sequence[KernelGroupInfo]:
        normalized, formats = normalize_and_discover_per_layer_formats(
            views, engine_group_layer_indices(infos), EngineType.VLLM, layout_hints(plan)
        )
        return list(KVLayerGroupsManager(normalized, formats, infos, chunk_size_tokens).kernel_groups)

    groups: Sequence[KernelGroupInfo] = foreign(read)
    if len(groups) != len(infos):
        raise TransferRefused(Reason.SERVER_DISAGREES, {"groups": len(infos), "groups_read": len(groups)})
    return groups


def _differences(plan: Plan, planned: EngineGroup, read: KernelGroupInfo) -> Iterator[tuple[str, object, object]]:
    """What the server derives for a group that is not what was proven: name, planned, read."""
    page, shape = plan.layers[planned.layer_indices[0]].page, read.shape_desc
    stride_bytes = shape.block_stride_elems * shape.element_size or planned.block_stride_bytes
    both = (
        ("layer_indices", planned.layer_indices, tuple(read.layer_indices)),
        ("format", page.format.value, read.engine_kv_format.name),
        ("planes", page.planes, shape.kv_size),
        ("blocks", planned.num_blocks, shape.nb),
        ("slots_per_block", planned.slots_per_block, shape.bs),
        ("heads", page.heads, shape.nh),
        ("width", page.width, shape.hs),
        ("dtype", page.dtype, read.dtype),
        ("block_stride_bytes", planned.block_stride_bytes, stride_bytes),
        ("tokens_per_block", planned.tokens_per_block, read.tokens_per_block),
        ("engine_group_id", planned.engine_group_id, read.engine_group_idx),
    )
    return ((name, one, two) for name, one, two in both if one != two)
