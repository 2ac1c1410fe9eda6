"""The proof refuses every rule that is wrong: whatever a rule returns, a transfer touches a block's own bytes or nothing."""

from collections.abc import Callable
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.edit import edit
from stages.engine_groups import engine_groups
from stages.errors import Fact, Reason, RegistrationRejected, Rejection, RuleRejected
from stages.model import (
    BlockRuns,
    CacheTensor,
    EditedLayer,
    Geometry,
    Kind,
    Layer,
    LayerCache,
    Layout,
    LeafSpec,
    OfferedGroup,
    PageFormat,
    Paging,
    Run,
    TransferPage,
)
from stages.pages import read_page
from stages.proof import minus, overlapping, prove, reaches_another_block
from stages.rules import RULES, Rule
from stages.rules.rule import Edit
from stages.validate import validate
from tests.stages.judge import judge
from tests.stages.worlds import Laid, Page, World, served

BLOCKS, SLOTS, HEADS, CONTENT = 4, 4, 2, 8
BLOCK_BYTES = 2 * SLOTS * HEADS * CONTENT * 2
PADDING_BYTES = 64
STEP_BYTES = 2 * (BLOCK_BYTES + PADDING_BYTES)


def two_layers(padding_bytes: int = PADDING_BYTES, page_bytes: int = BLOCK_BYTES + PADDING_BYTES) -> World:
    """Two layers of attention in blocks-first memory, a block of one layer beside that of the other, with padding between."""
    page = Page(torch.bfloat16, {"N": 2 * SLOTS, "H": HEADS, "C": CONTENT}, "BHNC", "NHC")
    spec = LeafSpec(Kind.FULL_ATTENTION, 2 * SLOTS, page_bytes, 2 * SLOTS)
    step = 2 * (BLOCK_BYTES + padding_bytes)
    cuts = [page.cut("s", start, step, BLOCKS) for start in (0, BLOCK_BYTES + padding_bytes)]
    layers = tuple(Laid(f"l.{index}", spec, (cut,)) for index, cut in enumerate(cuts))
    return World((OfferedGroup(("l.0", "l.1"), BLOCKS, {"l.0": spec, "l.1": spec}),), layers, {"s": BLOCKS * step}, "NHD")


def kernel_paged() -> World:
    """One layer whose block is two kernel pages."""
    page = Page(torch.bfloat16, {"N": SLOTS, "H": HEADS, "C": CONTENT}, "BHNC", "NHC", pages=2)
    spec = LeafSpec(Kind.FULL_ATTENTION, 2 * SLOTS, page.content_bytes, 2 * SLOTS)
    laid = Laid("l.0", spec, (page.cut("s", 0, page.content_bytes, BLOCKS),), pages=2)
    return World((OfferedGroup(("l.0",), BLOCKS, {"l.0": spec}),), (laid,), {"s": BLOCKS * page.content_bytes}, "NHD")


def refused(world: World, view: Callable[[torch.Tensor], torch.Tensor], only: str = "l.0") -> tuple[Rejection, ...]:
    """The refusals of one layer whose rule returns `view` of its raw tensor."""
    wrong = Rule("wrong-view", "wrong", lambda layer, _: layer.name == only, lambda layer, _: Edit(view(layer.raw)))
    with pytest.raises(RegistrationRejected) as caught:
        edit(validate(world.offer()), (wrong, *RULES))
    assert any(only in rejection.layer_names and rejection.rule == "wrong-view" for rejection in caught.value.rejections)
    return caught.value.rejections


def test_a_copy_is_refused() -> None:
    """A rule that hands over memory of its own, however right its contents, registers nothing of the engine's."""
    (rejection,) = refused(two_layers(), lambda raw: raw.clone())
    assert rejection.reason is Reason.NOT_A_VIEW


WRONG: dict[str, tuple[Callable[[], World], Callable[[torch.Tensor], torch.Tensor], Reason, dict[str, Fact]]] = {
    "kernel pages as they are": (kernel_paged, lambda raw: raw, Reason.BLOCK_COUNT, {"view_blocks": 8, "num_blocks": 4}),
    "the first kernel page of each block": (
        kernel_paged,
        lambda raw: raw[::2],
        Reason.SLOTS_PER_BLOCK,
        {"view_slots": 4, "slots_per_block": 8},
    ),
    "the second kernel page of each block, in shares": (
        kernel_paged,
        lambda raw: raw.as_strided((BLOCKS, 2 * SLOTS, 1, 8), (128, 8, 8, 1), 64),
        Reason.BYTES_MISSED,
        {"missed_bytes": 128, "owned_bytes": 256},
    ),
    "every block but the last": (two_layers, lambda raw: raw[:-1], Reason.BLOCK_COUNT, {"view_blocks": 3, "num_blocks": 4}),
    "one block on": (
        two_layers,
        lambda raw: raw.as_strided(raw.shape, raw.stride(), raw.storage_offset() + raw.stride(0)),
        Reason.BYTES_MISSED,
        {"missed_bytes": 256, "owned_bytes": 256},
    ),
    "one element on": (
        two_layers,
        lambda raw: raw.as_strided(raw.shape, raw.stride(), raw.storage_offset() + 1),
        Reason.BYTES_MISSED,
        {"missed_bytes": 2, "owned_bytes": 256},
    ),
    "the other layer's pages": (
        two_layers,
        lambda raw: raw.as_strided(raw.shape, raw.stride(), (BLOCK_BYTES + PADDING_BYTES) // 2),
        Reason.BYTES_MISSED,
        {"missed_bytes": 256, "owned_bytes": 256},
    ),
    "half of each slot": (
        two_layers,
        lambda raw: raw.as_strided((BLOCKS, 2 * SLOTS, 1, CONTENT), (raw.stride(0), CONTENT, CONTENT, 1)),
        Reason.BYTES_MISSED,
        {"missed_bytes": 128, "owned_bytes": 256},
    ),
    "a page wider than its block stride": (
        two_layers,
        lambda raw: raw.as_strided((BLOCKS - 1, 2 * SLOTS, 1, 48), (raw.stride(0), 48, 48, 1)),
        Reason.UNREADABLE_VIEW,
        {"kind": "full_attention", "shape": (3, 8, 1, 48), "stride": (320, 48, 48, 1)},
    ),
    "into the padding and on into the other layer": (
        two_layers,
        lambda raw: raw.as_strided((BLOCKS, 2 * SLOTS, 1, 24), (raw.stride(0), 24, 24, 1)),
        Reason.BYTES_BEYOND_PADDING,
        {"beyond_bytes": 64, "page_size_bytes": 320},
    ),
    "half as many slots, twice as wide": (
        two_layers,
        lambda raw: raw.as_strided((BLOCKS, SLOTS, 1, 4 * CONTENT), (raw.stride(0), 4 * CONTENT, 4 * CONTENT, 1)),
        Reason.SLOTS_PER_BLOCK,
        {"view_slots": 4, "slots_per_block": 8},
    ),
    "tight blocks where the engine's are apart": (
        two_layers,
        lambda raw: raw.as_strided((BLOCKS, 2 * SLOTS, 1, 2 * CONTENT), (4 * SLOTS * CONTENT, 2 * CONTENT, 2 * CONTENT, 1)),
        Reason.BLOCK_STRIDE,
        {"view_stride_bytes": 256, "block_stride_bytes": 640},
    ),
    "a page with a hole": (
        two_layers,
        lambda raw: raw.as_strided((BLOCKS, 2 * SLOTS, 1, CONTENT), (raw.stride(0), 2 * CONTENT, 2 * CONTENT, 1)),
        Reason.UNREADABLE_VIEW,
        {"kind": "full_attention", "shape": (4, 8, 1, 8), "stride": (320, 16, 16, 1)},
    ),
    "a flat page": (
        two_layers,
        lambda raw: raw.as_strided((BLOCKS, 4 * SLOTS * CONTENT), (raw.stride(0), 1)),
        Reason.UNREADABLE_VIEW,
        {"kind": "full_attention", "shape": (4, 128), "stride": (320, 1)},
    ),
    "heads in the place of slots": (
        two_layers,
        lambda raw: raw.as_strided((BLOCKS, 2, 8, 16), (raw.stride(0), 128, 16, 1)),
        Reason.SLOTS_PER_BLOCK,
        {"view_slots": 2, "slots_per_block": 8},
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_view_is_refused_with_the_numbers(what: str) -> None:
    """A rule that is wrong by a block, a slot, a page, a layer or a stride registers nothing, and the refusal says what was wrong."""
    make, view, reason, facts = WRONG[what]
    (rejection,) = refused(make(), view)
    assert (rejection.reason, rejection.facts) == (reason, facts)


OVERREACHING: dict[str, tuple[BlockRuns, Reason, dict[str, Fact]]] = {
    "a run that ends in the next block": (
        BlockRuns((Run(0, STEP_BYTES + 1),), STEP_BYTES, BLOCKS),
        Reason.BYTES_OF_ANOTHER_BLOCK,
        {"planned_bytes": 641, "block_stride_bytes": 640},
    ),
    "a second run in a later block": (
        BlockRuns((Run(0, BLOCK_BYTES), Run(2 * STEP_BYTES + 9, 2 * STEP_BYTES + 10)), STEP_BYTES, BLOCKS),
        Reason.BYTES_OF_ANOTHER_BLOCK,
        {"planned_bytes": 257, "block_stride_bytes": 640},
    ),
    "a run that begins before the storage": (
        BlockRuns((Run(-2, BLOCK_BYTES),), STEP_BYTES, BLOCKS),
        Reason.PAST_STORAGE,
        {"end_bytes": 2176, "storage_bytes": 2176},
    ),
    "a last run that ends past the storage": (
        BlockRuns((Run(0, BLOCK_BYTES + 2),), STEP_BYTES, BLOCKS),
        Reason.PAST_STORAGE,
        {"end_bytes": 2178, "storage_bytes": 2176},
    ),
    "a run beyond the page": (
        BlockRuns((Run(0, BLOCK_BYTES), Run(STEP_BYTES - 9, STEP_BYTES - 8)), STEP_BYTES, BLOCKS),
        Reason.BYTES_BEYOND_PADDING,
        {"beyond_bytes": 1, "page_size_bytes": 320},
    ),
    "one byte less at the end": (
        BlockRuns((Run(0, BLOCK_BYTES - 1),), STEP_BYTES, BLOCKS),
        Reason.BYTES_MISSED,
        {"missed_bytes": 1, "owned_bytes": 256},
    ),
    "one block less": (BlockRuns((Run(0, BLOCK_BYTES),), STEP_BYTES, BLOCKS - 1), Reason.BLOCK_COUNT, {"view_blocks": 3, "num_blocks": 4}),
    "another stride": (
        BlockRuns((Run(0, BLOCK_BYTES),), STEP_BYTES + 2, BLOCKS),
        Reason.BLOCK_STRIDE,
        {"view_stride_bytes": 642, "block_stride_bytes": 640},
    ),
}


@pytest.mark.parametrize("what", OVERREACHING)
def test_a_reading_that_overreaches_is_refused(what: str) -> None:
    """The proof does not lean on what today's transfer can be made to read: any reading is judged by the bytes it copies."""
    planned, reason, facts = OVERREACHING[what]
    world = two_layers()
    # The last block is tight where the storage must end it, roomy where another bound is to be the one that is crossed.
    end = (BLOCKS - 1) * STEP_BYTES + BLOCK_BYTES if reason is Reason.PAST_STORAGE else (BLOCKS + 2) * STEP_BYTES
    single = World((OfferedGroup(("l.0",), BLOCKS, {"l.0": world.layers[0].spec}),), world.layers[:1], {"s": end}, "NHD")
    (layer,) = validate(single.offer()).layers
    page = read_page(layer.raw, Layout.NHD)
    assert page is not None
    prove(layer, page)
    with pytest.raises(RuleRejected) as caught:
        prove(layer, replace(page, planned=planned))
    assert (caught.value.reason, caught.value.facts) == (reason, facts)


def test_padding_that_two_layers_both_claim_is_refused() -> None:
    """Where specs say that one layer's page reaches into the next one's, a rule that uses that room is refused, and both are named."""
    world = two_layers(padding_bytes=0, page_bytes=2 * BLOCK_BYTES)
    rejections = refused(world, lambda raw: raw.as_strided((BLOCKS, 2 * SLOTS, 1, 20), (raw.stride(0), 20, 20, 1)))
    assert {rejection.reason for rejection in rejections} == {Reason.BYTES_OF_ANOTHER_LAYER}
    others = {name: rejection.facts["other_layer"] for rejection in rejections for name in rejection.layer_names}
    assert others == {"l.0": "l.1", "l.1": "l.0"}


def test_layers_that_cannot_be_told_apart_are_refused() -> None:
    """Equal pages with other strides need an identity of their own; a slot of one byte can have no other."""
    page = Page(torch.int8, {"N": 4, "C": 1}, "BNC", "NC")
    specs = {name: LeafSpec(Kind.MLA_ATTENTION, 4, step, 4) for name, step in (("l.0", 4), ("l.1", 8), ("l.2", 16))}
    layers = tuple(Laid(name, spec, (page.cut(name, 0, spec.page_size_bytes, BLOCKS),)) for name, spec in specs.items())
    world = World((OfferedGroup(tuple(specs), BLOCKS, specs),), layers, dict.fromkeys(specs, 16 * BLOCKS), "NHD")
    with pytest.raises(RegistrationRejected) as caught:
        edit(validate(world.offer()))
    (rejection,) = caught.value.rejections
    assert (rejection.reason, rejection.layer_names) == (Reason.TRANSFER_IDENTITY_SHARED, ("l.2",))


@st.composite
def any_rule(draw: st.DrawFn) -> Rule:
    """A rule that takes the right view and then strays: another start, stride, shape or dim order, or none of these."""
    shift = draw(st.sampled_from((0, 0, 0, 1, 4, -4)))
    stretch = draw(st.sampled_from((0, 0, 0, 1, 8, -1)))
    grown, by = draw(st.integers(0, 4)), draw(st.sampled_from((0, 0, 1, -1, 4)))
    swapped = draw(st.sampled_from((None, None, (1, 2), (0, 1), (2, 3))))
    dense = draw(st.booleans())
    merged = draw(st.booleans())

    def apply(layer: Layer, layout: Layout) -> Edit:
        rule = next((rule for rule in RULES if rule.matches(layer, layout)), None)
        right = rule.apply(layer, layout) if rule else Edit(layer.raw, layer.block_dim, opaque=False)
        shape, stride = list(right.view.shape), list(right.view.stride())
        shape[grown % len(shape)] = max(shape[grown % len(shape)] + by, 1)
        if merged and len(shape) == 4:
            shape, stride = [shape[0], shape[1] * shape[2], shape[3]], [stride[0], shape[3], 1]
        if dense:
            stride[1:] = [prod(shape[dim + 1 :]) for dim in range(1, len(shape))]
        stride[0] = max(stride[0] + stretch, 0)
        if swapped is not None and max(swapped) < len(shape):
            one, other = swapped
            shape[one], shape[other], stride[one], stride[other] = shape[other], shape[one], stride[other], stride[one]
        try:
            return Edit(right.view.as_strided(shape, stride, max(right.view.storage_offset() + shift, 0)), right.block_dim, opaque=True)
        except RuntimeError:  # out of the storage: torch makes no such view
            return right

    return Rule("any-view", "anything", lambda layer, layout: True, apply)


@settings(max_examples=120)
@given(served(), any_rule())
def test_whatever_a_rule_returns_no_wrong_byte_is_moved(world: World, rule: Rule) -> None:
    """I may write any rule: what the proof lets through moves a block's own bytes, slots and groups right, or is refused by name."""
    try:
        plan = engine_groups(edit(validate(world.offer("cpu")), (rule,)))
    except RegistrationRejected:
        return
    judge(world, plan)


# ------------------------------------------------------------------------------------------------- the arithmetic of runs

runs = st.tuples(st.integers(0, 40), st.integers(1, 20)).map(lambda pair: Run(pair[0], pair[0] + pair[1]))


def cells(*some: Run) -> set[int]:
    """The bytes of runs."""
    return {byte for run in some for byte in range(run.start, run.stop)}


@given(st.lists(runs, max_size=4), st.lists(runs, max_size=4))
def test_what_is_left_of_runs_is_counted_byte_by_byte(some: list[Run], others: list[Run]) -> None:
    """The missed and the spilt bytes a refusal tells are exactly those."""
    assert cells(*minus(tuple(some), tuple(others))) == cells(*some) - cells(*others)


@given(runs, runs, st.integers(0, 30), st.integers(0, 6))
def test_reaching_another_block_is_what_trying_every_pair_of_blocks_finds(run: Run, other: Run, stride: int, blocks: int) -> None:
    """No block is overlooked between the first and the last, and none is blamed that is not there."""
    shifted = [[Run(each.start + block * stride, each.stop + block * stride) for block in range(blocks)] for each in (run, other)]
    meets = any(cells(a) & cells(b) for i, a in enumerate(shifted[0]) for j, b in enumerate(shifted[1]) if i != j)
    assert reaches_another_block(run, other, stride, blocks) == meets


# ------------------------------------------------------------------------------------------------------ layers beside layers


def placed(name: str, group: int, storage: str, begin: int, planned: BlockRuns) -> EditedLayer:
    """A layer that begins somewhere in a storage, and whose transfer touches these bytes counted from there."""
    tensor = torch.empty(1, 1, 1, dtype=torch.uint8)
    spec = LeafSpec(Kind.MLA_ATTENTION, 1, 1, 1)
    layer = Layer(name, LayerCache((CacheTensor(tensor, storage, 1),)), group, Geometry(spec, 0, 1, planned, 0, 1), begin)
    page = TransferPage(PageFormat.MLA, torch.uint8, 1, 1, 1, 1, planned)
    return EditedLayer(layer, tensor, Paging((1, 1, 1), (1, 1, 1), 0, page, 0))


@st.composite
def neighbours(draw: st.DrawFn, strides: st.SearchStrategy[int], pieces: int) -> list[EditedLayer]:
    """Up to six layers in two groups and storages, their blocks at random, of up to so many runs no longer than the stride."""
    layers = []
    for index in range(draw(st.integers(1, 6))):
        stride, blocks, start = draw(strides), draw(st.integers(0, 4)), draw(st.integers(-3, 3))
        bounds = draw(st.lists(st.integers(start, start + stride), min_size=2, max_size=2 * pieces, unique=True).map(sorted))
        some = tuple(Run(*bounds[at : at + 2]) for at in range(0, len(bounds) - 1, 2))
        group, storage = draw(st.sampled_from(((0, "a"), (0, "a"), (0, "a"), (0, "b"), (1, "a"))))
        layers.append(placed(f"l.{index}", group, storage, draw(st.integers(3, 40)), BlockRuns(some, stride, blocks)))
    return layers


def meeting(layers: list[EditedLayer]) -> dict[str, set[str]]:
    """Which other layers each layer's bytes meet that are live under the same block ids, found byte by byte."""

    def touched(edited: EditedLayer) -> set[tuple[int, str, int]]:
        planned, layer = edited.page.planned, edited.layer
        steps = (block * planned.stride_bytes for block in range(planned.num_blocks))
        return {(layer.group, layer.cache.tensors[0].storage, byte + step) for step in steps for byte in cells(*planned.runs)}

    bytes_of = {edited.layer.name: touched(edited) for edited in layers}
    return {
        one: others
        for one, held in bytes_of.items()
        if (others := {other for other, theirs in bytes_of.items() if other != one and held & theirs})
    }


def told_of(layers: list[EditedLayer]) -> dict[str, Fact]:
    """The layer that each refused layer is said to meet."""
    refused = list(overlapping(layers))
    assert {refusal.reason for _, refusal in refused} <= {Reason.BYTES_OF_ANOTHER_LAYER}
    assert len({edited.layer.name for edited, _ in refused}) == len(refused)
    return {edited.layer.name: refusal.facts["other_layer"] for edited, refusal in refused}


@settings(max_examples=300)
@given(neighbours(st.integers(1, 16), pieces=3))
def test_every_layer_that_meets_another_is_refused(layers: list[EditedLayer]) -> None:
    """Whatever their strides, blocks and runs: of two layers of a group whose bytes meet, both are told, each once."""
    assert told_of(layers).keys() >= meeting(layers).keys()


@settings(max_examples=300)
@given(st.integers(1, 16).flatmap(lambda stride: neighbours(st.just(stride), pieces=1)))
def test_layers_of_one_stride_are_refused_only_where_they_meet(layers: list[EditedLayer]) -> None:
    """Blocks of one run each, one stride apart, as an engine's are: exactly the layers that meet are told, and whom they meet."""
    told, met = told_of(layers), meeting(layers)
    assert told.keys() == met.keys()
    assert all(other in met[name] for name, other in told.items())


def test_a_single_block_without_a_stride_meets_what_lies_on_it() -> None:
    """Layers of one block each need no stride to be beside each other, and none to be refused."""
    one, beside, on = (placed(name, 0, "a", begin, BlockRuns((Run(0, 8),), 0, 1)) for name, begin in (("l.0", 0), ("l.1", 8), ("l.2", 7)))
    assert told_of([one, beside]) == {}
    assert told_of([one, on]) == {"l.0": "l.2", "l.2": "l.0"}
