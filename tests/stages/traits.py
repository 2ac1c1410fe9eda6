"""What a drawn worker is made of, in words: by these the fuzzing says what it has covered."""

from collections.abc import Iterator
from itertools import combinations

from stages.model import MLA_KINDS, Kind, Layout
from tests.stages.judge import transferred
from tests.stages.worlds import ATTENTION_KINDS, DTYPES, Laid, World

KINDS = (*ATTENTION_KINDS, *sorted(MLA_KINDS), Kind.MAMBA)

TRAITS: dict[str, tuple[str, ...]] = {
    "kind": tuple(map(str, KINDS)),
    "layout": (*(str(layout) for layout in Layout if not layout.scattered), "not said"),
    "registered as": ("rank 3", "rank 4", "rank 5", "rank 5, K and V first", "list of 1", "list of 2", "list of 3"),
    "kernel pages a block": ("1", "2", "3", "5"),
    "padding": ("none", "in the page", "beyond the page"),
    "dtype": tuple(str(dtype).removeprefix("torch.") for dtype in DTYPES),
    "blocks": ("0", "1", "2", "more"),
    "heads": ("1", "2", "more"),
    "slots a token": ("one", "fewer", "more"),
    "first byte": ("0", "further on"),
    "a block's memory": ("one layer's", "several layers'"),
    "groups": ("one", "overlaid", "of different numbers of blocks"),
    "beside them": ("sharing layers", "scratch", "not transferable", "auxiliary pools", "an empty group", "two context-parallel ranks"),
}
"""What vLLM allocates and kvreg serves: of each trait, every value must have been drawn among the workers that must be served."""


def traits(world: World) -> set[tuple[str, str]]:
    """Every trait of a worker's transferred layers and of the worker, with its value."""
    expected = transferred(world)
    layers = [laid for laid in world.layers if laid.name in expected]
    return {trait for laid in layers for trait in _of_layer(laid, expected[laid.name][1])} | set(_of_world(world, layers))


def _of_layer(laid: Laid, num_blocks: int) -> Iterator[tuple[str, str]]:
    spec, first = laid.spec, laid.cuts[0]
    yield "kind", str(spec.kind)
    rank = f"rank {len(first.shape)}" + (", K and V first" if laid.block_dim == 1 else "")
    yield "registered as", f"list of {len(laid.cuts)}" if laid.listed else rank
    yield "kernel pages a block", str(laid.pages)
    yield "blocks", str(num_blocks) if num_blocks < 3 else "more"
    yield "first byte", "further on" if first.offset else "0"
    for cut in laid.cuts:
        yield "dtype", str(cut.dtype).removeprefix("torch.")
    if num_blocks > 1 and laid.block_dim == 0:
        yield "padding", _padding(laid)
    if spec.kind is not Kind.MAMBA:
        heads = {4: 1, 5: 3}.get(len(first.shape))  # [B,H,N,C] and [..,N,H,D]
        number = 1 if heads is None else first.shape[heads]
        yield "heads", str(number) if number < 3 else "more"
        yield "slots a token", "one" if spec.num_states == spec.block_size else "fewer" if spec.num_states < spec.block_size else "more"


def _padding(laid: Laid) -> str:
    content = sum(_inner_bytes(laid, index) for index in range(len(laid.cuts)))
    step = laid.cuts[0].stride[0] * laid.pages * laid.cuts[0].dtype.itemsize
    return "beyond the page" if step > laid.spec.page_size_bytes else "in the page" if step > content else "none"


def _inner_bytes(laid: Laid, index: int) -> int:
    """Content bytes of one block of one tensor whose first dim counts blocks."""
    size = laid.pages * laid.cuts[index].dtype.itemsize
    for dim in laid.cuts[index].shape[1:]:
        size *= dim
    return size


def _of_world(world: World, layers: list[Laid]) -> Iterator[tuple[str, str]]:
    yield "layout", world.layout or "not said"
    group_of = {name: index for index, group in enumerate(world.groups) for name in group.layer_names}
    for one, other in combinations((laid for laid in layers if laid.name in group_of), 2):
        if one.cuts[0].storage != other.cuts[0].storage:
            continue
        if group_of[one.name] != group_of[other.name]:
            yield "groups", "overlaid"
        elif abs(_start(one) - _start(other)) < one.cuts[0].stride[one.block_dim] * one.pages * one.cuts[0].dtype.itemsize:
            yield "a block's memory", "several layers'"
    yield "a block's memory", "one layer's"
    used = [group for group in world.groups if group.layer_names]
    yield (
        "groups",
        "one" if len(used) == 1 else "of different numbers of blocks" if len({group.num_blocks for group in used}) > 1 else "several",
    )
    names = {laid.name for laid in world.layers}
    beside = {
        "sharing layers": names - set(group_of) - set(world.pools),
        "scratch": "scratch" in names,
        "not transferable": any(not group.transferable for group in world.groups),
        "auxiliary pools": world.pools,
        "an empty group": len(used) < len(world.groups),
        "two context-parallel ranks": world.dcp_size > 1,
    }
    yield from (("beside them", what) for what, found in beside.items() if found)


def _start(laid: Laid) -> int:
    return laid.cuts[0].offset * laid.cuts[0].dtype.itemsize
