"""edit: which layout becomes which view, by which rule; and what no view can be made of."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch

from stages.edit import IDENTITY_SPLIT_VIEW, edit
from stages.engine_groups import engine_groups
from stages.errors import Fact, Reason, RegistrationRejected, Rejection, Stage
from stages.model import EditedLayer, Kind, LeafSpec, OfferedGroup
from stages.rules import RULES
from stages.validate import validate
from tests.stages.judge import judge
from tests.stages.worlds import Cut, Laid, Page, World, state_spec

BLOCKS = 3
KV = {"N": 4, "H": 2, "C": 16}
KEYS_AND_VALUES = {"N": 4, "H": 2, "C": 8, "K": 2}
LATENT = {"N": 4, "C": 16}
BF16, INT8, UINT8 = torch.bfloat16, torch.int8, torch.uint8


def attention(
    page: Page,
    kind: Kind = Kind.FULL_ATTENTION,
    padding: int = 0,
    blocks: int = BLOCKS,
    layout: str | None = "NHD",
    ratio: Fraction = Fraction(1),
) -> World:
    """One layer of attention in a storage of its own."""
    size = page.content_bytes + padding
    spec = LeafSpec(kind, int(page.states * ratio), size, page.states, tokens_per_state=ratio)
    laid = Laid("l.0", spec, (page.cut("s", 0, size, blocks),), page.logical.index("B"), page.pages)
    return World((OfferedGroup(("l.0",), blocks, {"l.0": spec}),), (laid,), {"s": blocks * size}, layout)


def states(
    *cuts: Cut, block_size: int, page: int, blocks: int = BLOCKS, listed: bool = True, layout: str = "NHD", storage: int | None = None
) -> World:
    """One layer of recurrent state in a storage of its own."""
    spec = state_spec(block_size, page, None, "align")
    laid = Laid("l.0", spec, cuts, listed=listed)
    return World((OfferedGroup(("l.0",), blocks, {"l.0": spec}),), (laid,), {"s": storage or blocks * page}, layout)


def conv_and_ssm(**more: Any) -> World:
    """`[conv, ssm]` in a page of 128 bytes: 24 bytes of conv, transposed in memory, 64 of ssm, and padding."""
    conv = Cut("s", BF16, (BLOCKS, 3, 4), (64, 1, 3), 0)
    ssm = Cut("s", torch.float32, (BLOCKS, 2, 4, 2), (32, 8, 2, 1), 6)
    return states(conv, ssm, **{"block_size": 8, "page": 128, **more})


def unified(content: int = 88, **more: Any) -> World:
    """All states in one `[NB,1,1,C]`, padding in C or not."""
    return states(
        Cut("s", INT8, (BLOCKS, 1, 1, content), (128, content, content, 1), 0), listed=False, **{"block_size": 8, "page": 128, **more}
    )


def further(world: World, by_bytes: int) -> World:
    """The layer further on in its storage."""
    laid = world.layers[0]
    cuts = tuple(replace(cut, offset=cut.offset + by_bytes // cut.dtype.itemsize) for cut in laid.cuts)
    return replace(world, layers=(replace(laid, cuts=cuts),), storage_bytes={"s": world.storage_bytes["s"] + by_bytes})


@dataclass(frozen=True)
class Told:
    """A layout, and the rule, shape and opacity that come of it."""

    world: World
    rule: str | None
    shape: tuple[int, ...]
    opaque: bool = True


LAYOUTS: dict[str, Told] = {
    # K and V outermost, in memory or only in dims, and blocks outermost (up to 0.25)
    "[2,NB,BS,H,D] K/V-first": Told(attention(Page(BF16, KEYS_AND_VALUES, "KBNHC", "KBNHC")), None, (2, 3, 4, 2, 8), opaque=False),
    "[2,NB,BS,H,D] K/V-first, HND": Told(
        attention(Page(BF16, KEYS_AND_VALUES, "KBNHC", "KBHNC"), layout="HND"), None, (2, 3, 4, 2, 8), opaque=False
    ),
    "[2,NB,BS,H,D] blocks-first in memory": Told(
        attention(Page(BF16, KEYS_AND_VALUES, "KBNHC", "KNHC")), None, (2, 3, 4, 2, 8), opaque=False
    ),
    "[2,NB,BS,H,D] blocks-first in memory, two blocks": Told(
        attention(Page(BF16, KEYS_AND_VALUES, "KBNHC", "KNHC"), blocks=2), "reordered-attention-view", (2, 4, 1, 32)
    ),
    "[NB,2,BS,H,D]": Told(attention(Page(BF16, KEYS_AND_VALUES, "BKNHC", "KNHC")), None, (3, 2, 4, 2, 8), opaque=False),
    "[NB,2,BS,H,D] HND": Told(attention(Page(BF16, KEYS_AND_VALUES, "BKNHC", "KHNC"), layout="HND"), None, (3, 2, 4, 2, 8), opaque=False),
    "[NB,2,BS,H,D] padded": Told(
        attention(Page(BF16, KEYS_AND_VALUES, "BKNHC", "KNHC"), padding=64), "reordered-attention-view", (3, 4, 1, 32)
    ),
    "[P,2,s,H,D] two kernel pages": Told(
        attention(Page(BF16, KEYS_AND_VALUES, "BKNHC", "KNHC", pages=2)), "subpaged-attention-view", (3, 8, 1, 32)
    ),
    "[P,2,s,H,D] two kernel pages, HND": Told(
        attention(Page(BF16, KEYS_AND_VALUES, "BKNHC", "KHNC", pages=2), layout="HND"), "subpaged-attention-view", (3, 1, 8, 32)
    ),
    "[2,P,s,H,D] two kernel pages, blocks-first in memory": Told(
        attention(Page(BF16, KEYS_AND_VALUES, "KBNHC", "KNHC", pages=2)), "subpaged-attention-view", (3, 8, 1, 32)
    ),
    "[2,P,s,H,D] two kernel pages, K/V-first": Told(
        attention(Page(BF16, KEYS_AND_VALUES, "KBNHC", "KBNHC", pages=2)), "subpaged-kv-first-attention-view", (2, 3, 8, 2, 8), opaque=False
    ),
    "[2,P,s,H,D] two kernel pages, K/V-first, HND": Told(
        attention(Page(BF16, KEYS_AND_VALUES, "KBNHC", "KBHNC", pages=2), layout="HND"),
        "subpaged-kv-first-attention-view",
        (2, 3, 1, 8, 16),
    ),
    "[2,NB,BS,H,D] K/V-first, HND in memory, NHD by name": Told(
        attention(Page(BF16, KEYS_AND_VALUES, "KBNHC", "KBHNC")), "reordered-attention-view", (2, 3, 4, 1, 16)
    ),
    "[2,NB,BS,H,D] K/V-first, NHD in memory, HND by name, further on in its storage": Told(
        further(attention(Page(BF16, KEYS_AND_VALUES, "KBNHC", "KBNHC"), layout="HND"), 96), "reordered-attention-view", (2, 3, 1, 4, 16)
    ),
    # one content dim for K and V (0.26 on)
    "[NB,H,BS,C] NHD": Told(attention(Page(BF16, KV, "BHNC", "NHC")), None, (3, 2, 4, 16), opaque=False),
    "[NB,H,BS,C] HND": Told(attention(Page(BF16, KV, "BHNC", "HNC"), layout="HND"), None, (3, 2, 4, 16), opaque=False),
    "[NB,H,BS,C] BLNHC, padded": Told(
        attention(Page(BF16, KV, "BHNC", "NHC"), padding=32, layout="BLNHC"), None, (3, 2, 4, 16), opaque=False
    ),
    "[NB,H,BS,C] BLHNC, padded": Told(
        attention(Page(BF16, KV, "BHNC", "HNC"), padding=32, layout="BLHNC"), None, (3, 2, 4, 16), opaque=False
    ),
    "[P,H,s,C] two kernel pages": Told(
        attention(Page(BF16, KV, "BHNC", "NHC", pages=2)), "subpaged-attention-view", (3, 2, 8, 16), opaque=False
    ),
    "[P,H,s,C] two kernel pages, HND": Told(
        attention(Page(BF16, KV, "BHNC", "HNC", pages=2), layout="LBHNC"), "subpaged-attention-view", (3, 1, 8, 32)
    ),
    "[NB,H,BS,C] HND in memory, NHD by name": Told(attention(Page(BF16, KV, "BHNC", "HNC")), "reordered-attention-view", (3, 4, 1, 32)),
    "[NB,H,BS,C] one padded block": Told(
        attention(Page(BF16, KV, "BHNC", "NHC"), padding=32, blocks=1), "reordered-attention-view", (1, 2, 4, 16), opaque=False
    ),
    # latent, indexer, compressed, fractional
    "[NB,BS,C]": Told(attention(Page(BF16, LATENT, "BNC", "NC"), Kind.MLA_ATTENTION), None, (3, 4, 16), opaque=False),
    "[NB,BS,C] padded": Told(attention(Page(BF16, LATENT, "BNC", "NC"), Kind.MLA_ATTENTION, padding=32), None, (3, 4, 16), opaque=False),
    "[P,s,C] three kernel pages": Told(
        attention(Page(BF16, LATENT, "BNC", "NC", pages=3), Kind.MLA_ATTENTION), "subpaged-mla-attention-view", (3, 12, 16), opaque=False
    ),
    "[P,1,s,C] three kernel pages": Told(
        attention(Page(BF16, {**LATENT, "H": 1}, "BHNC", "HNC", pages=3, head_step=16), Kind.MLA_ATTENTION, layout="LBNHC"),
        "subpaged-mla-attention-view",
        (3, 1, 12, 16),
        opaque=False,
    ),
    "[P,1,s,C] three kernel pages, HND": Told(
        attention(Page(BF16, {**LATENT, "H": 1}, "BHNC", "HNC", pages=3), Kind.MLA_ATTENTION, layout="LBHNC"),
        "subpaged-mla-attention-view",
        (3, 1, 12, 16),
        opaque=False,
    ),
    "[NB,BS,132] indexer": Told(
        attention(Page(UINT8, {"N": 4, "C": 132}, "BNC", "NC"), Kind.MLA_ATTENTION), None, (3, 4, 132), opaque=False
    ),
    "[NB,BS/4,C] compressed": Told(
        attention(Page(BF16, LATENT, "BNC", "NC"), Kind.MLA_ATTENTION, ratio=Fraction(4)), None, (3, 4, 16), opaque=False
    ),
    "[NB,H,4*BS,C] four states a token": Told(
        attention(Page(BF16, {**KV, "N": 16}, "BHNC", "NHC"), Kind.CHUNKED_LOCAL_ATTENTION, ratio=Fraction(1, 4)),
        "fractional-state-view",
        (3, 4, 1, 128),
    ),
    "[NB,H,3/2*BS,C] three states for two tokens": Told(
        attention(Page(BF16, {**KV, "N": 6}, "BHNC", "HNC"), ratio=Fraction(2, 3), layout="HND"), "fractional-state-view", (3, 1, 4, 48)
    ),
    # recurrent state: 88 bytes in 8 slots, each rounded up to 16 where the page has room
    "[conv, ssm]": Told(conv_and_ssm(), "mamba-page-view", (3, 8, 1, 16)),
    "[conv, ssm] HND": Told(conv_and_ssm(layout="HND"), "mamba-page-view", (3, 1, 8, 16)),
    "[conv, ssm], a last page cut off after its states": Told(conv_and_ssm(storage=2 * 128 + 88), "mamba-page-view", (3, 8, 1, 11)),
    "[conv, ssm] in a block of more tokens than it divides into": Told(
        conv_and_ssm(block_size=90, storage=2 * 128 + 88), "mamba-page-view", (3, 2, 1, 44)
    ),
    "[conv, ssm] in a block that only one slot fits": Told(conv_and_ssm(block_size=131), "mamba-page-view", (3, 1, 1, 96)),
    "[NB,1,1,C]": Told(unified(), "mamba-unified-view", (3, 8, 1, 16)),
    "[NB,k,C] of one state, not a list": Told(
        states(Cut("s", BF16, (BLOCKS, 3, 8), (64, 1, 3), 0), block_size=8, page=128, listed=False), "mamba-unified-view", (3, 8, 1, 16)
    ),
    "[NB,1,1,C] with padding in C": Told(unified(content=128, layout="BLHNC"), "mamba-unified-view", (3, 1, 8, 16)),
}


def told(world: World) -> EditedLayer:
    """The one layer of a world, edited."""
    (layer,) = edit(validate(world.offer())).layers
    return layer


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_becomes_its_view(layout: str) -> None:
    """A layout that LMCache reads rightly is handed over as it is; any other is viewed as a page of its own bytes, by a named rule."""
    case = LAYOUTS[layout]
    layer = told(case.world)
    judge(case.world, engine_groups(edit(validate(case.world.offer()))))
    assert (layer.rule, tuple(layer.view.shape), layer.opaque) == (case.rule, case.shape, case.opaque)


def test_each_rule_is_shown_above() -> None:
    """A rule that no layout calls for is not one."""
    shown = {case.rule for case in LAYOUTS.values()} | {"no-blocks-view"}
    assert shown - {None} == {rule.name for rule in RULES}


def test_a_group_of_no_blocks_registers() -> None:
    """Where a group has no block at all, its layers still register, with the slots their specs say."""
    none = {name: case.world for name, case in LAYOUTS.items() if case.world.layers[0].block_dim == 0}
    for world in none.values():
        laid = world.layers[0]
        empty = replace(laid, cuts=tuple(replace(cut, shape=(0, *cut.shape[1:])) for cut in laid.cuts))
        group = replace(world.groups[0], num_blocks=0)
        layer = told(replace(world, layers=(empty,), groups=(group,), storage_bytes={"s": 0}))
        assert (layer.rule, layer.page.planned.num_blocks) == ("no-blocks-view", 0)
        assert layer.page.slots == (laid.spec.block_size if laid.spec.recurrent else laid.spec.slots_per_block)


def test_views_are_of_the_engine_s_own_memory() -> None:
    """What is written through a view is in the engine's memory, on whatever device that is: nothing is copied."""
    for case in LAYOUTS.values():
        offer = case.world.offer("cpu")
        (layer,) = edit(validate(offer)).layers
        layer.view.view(torch.uint8)[..., 0] = 7
        memory = torch.empty(0, dtype=torch.uint8).set_(layer.layer.raw.untyped_storage())
        assert int((memory == 7).sum()) == layer.view.numel() // layer.view.shape[-1]


# -------------------------------------------------------------------------------------------------------- what is refused


REFUSED: dict[str, tuple[Callable[[], World], Reason, str | None, dict[str, Fact]]] = {
    "padding between kernel pages": (
        lambda: apart(Page(BF16, KV, "BHNC", "NHC", pages=2), step=2 * (256 + 32)),
        Reason.PADDED_KERNEL_PAGES,
        "subpaged-attention-view",
        {"pages_per_block": 2, "runs": 2},
    ),
    "padding between a page's slots": (
        lambda: sliced(attention(Page(BF16, {**KV, "C": 20}, "BHNC", "NHC")), 16),
        Reason.SCATTERED_BLOCK,
        "reordered-attention-view",
        {"runs": 8},
    ),
    "more states than tokens that its bytes do not divide by": (
        lambda: attention(Page(UINT8, {"N": 6, "C": 5}, "BNC", "NC"), Kind.MLA_ATTENTION, ratio=Fraction(2, 3)),
        Reason.WIDTH,
        "fractional-state-view",
        {"content_bytes": 30, "room_bytes": 30, "slots_per_block": 4},
    ),
    "more states than tokens that its bytes do not divide by, one byte short of the room": (
        lambda: attention(Page(UINT8, {"N": 6, "C": 5}, "BNC", "NC"), Kind.MLA_ATTENTION, padding=1, ratio=Fraction(2, 3)),
        Reason.WIDTH,
        "fractional-state-view",
        {"content_bytes": 30, "room_bytes": 31, "slots_per_block": 4},
    ),
    "more states than tokens that the bytes of a K/V plane do not divide by": (
        lambda: attention(Page(UINT8, {**KEYS_AND_VALUES, "N": 6, "H": 1, "C": 3}, "KBNHC", "KBNHC"), ratio=Fraction(2, 3)),
        Reason.WIDTH,
        "reordered-attention-view",
        {"plane_bytes": 18, "slots_per_block": 4},
    ),
    "states further apart than a page": (
        lambda: states(
            *(Cut("s", INT8, (BLOCKS, 8), (128, 1), start) for start in (0, 100)), block_size=8, page=64, storage=BLOCKS * 128
        ),
        Reason.PAGE_TOO_LARGE,
        "mamba-page-view",
        {"content_bytes": 108, "room_bytes": 64},
    ),
    "K and V planes with padding between them": (
        lambda: stretched(attention(Page(BF16, KEYS_AND_VALUES, "KBNHC", "KBNHC"))),
        Reason.UNREADABLE_VIEW,
        "reordered-attention-view",
        {"kind": "full_attention", "shape": (2, 3, 4, 1, 16), "stride": (256, 64, 16, 16, 1)},
    ),
}  # fmt: skip


def apart(page: Page, step: int) -> World:
    """Kernel pages every `step / pages` bytes, wider than they are."""
    world = attention(page)
    laid = replace(world.layers[0], cuts=(page.cut("s", 0, step, BLOCKS),))
    return replace(world, layers=(laid,), storage_bytes={"s": BLOCKS * step})


def sliced(world: World, content: int) -> World:
    """The world with only the first `content` elements of each row registered."""
    laid = world.layers[0]
    cut = laid.cuts[0]
    return replace(world, layers=(replace(laid, cuts=(replace(cut, shape=(*cut.shape[:-1], content)),)),))


def stretched(world: World) -> World:
    """K/V-first memory with a gap between the planes."""
    laid = world.layers[0]
    cut = laid.cuts[0]
    wider = replace(cut, stride=(cut.stride[0] + 64, *cut.stride[1:]))
    return replace(world, layers=(replace(laid, cuts=(wider,)),), storage_bytes={"s": world.storage_bytes["s"] + 128})


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_view_can_be_made_of_is_refused(what: str) -> None:
    """A page that is not one run of bytes, or has no room for its slots, is refused by its rule's name, with the numbers."""
    make, reason, rule, facts = REFUSED[what]
    with pytest.raises(RegistrationRejected) as caught:
        edit(validate(make().offer()))
    assert caught.value.rejections == (Rejection(Stage.EDIT, reason, rule, 0, ("l.0",), facts),)


def test_layers_that_are_refused_alike_are_one_refusal() -> None:
    """Six bad layers of two kinds are two lines, in the order of their first layers; groups are refused apart."""
    scattered, unreadable = REFUSED["padding between a page's slots"], REFUSED["K and V planes with padding between them"]
    world = together(*(make() for make, *_ in (scattered, unreadable, scattered, unreadable, scattered, scattered)))
    names = world.groups[0].layer_names
    world = replace(world, groups=(replace(world.groups[0], layer_names=names[:5]), replace(world.groups[0], layer_names=names[5:])))
    with pytest.raises(RegistrationRejected) as caught:
        edit(validate(world.offer()))
    assert caught.value.rejections == (
        Rejection(Stage.EDIT, scattered[1], scattered[2], 0, ("l.0", "l.2", "l.4"), scattered[3]),
        Rejection(Stage.EDIT, unreadable[1], unreadable[2], 0, ("l.1", "l.3"), unreadable[3]),
        Rejection(Stage.EDIT, scattered[1], scattered[2], 1, ("l.5",), scattered[3]),
    )


def test_every_bad_layer_is_named_at_once() -> None:
    """One layer that cannot be proven does not hide another: both are refused, each under its own reason, in one error."""
    names = {"padding between a page's slots": "l.slots", "K and V planes with padding between them": "l.planes", "fine": "l.fine"}
    worlds = {name: REFUSED[what][0]() if what in REFUSED else attention(Page(BF16, LATENT, "BNC", "NC")) for what, name in names.items()}
    layers = tuple(
        replace(world.layers[0], name=name, cuts=tuple(replace(cut, storage=name) for cut in world.layers[0].cuts))
        for name, world in worlds.items()
    )
    group = OfferedGroup(tuple(worlds), BLOCKS, {laid.name: laid.spec for laid in layers})
    world = World((group,), layers, {name: world.storage_bytes["s"] for name, world in worlds.items()})
    with pytest.raises(RegistrationRejected) as caught:
        edit(validate(world.offer()))
    assert {(rejection.reason, rejection.layer_names) for rejection in caught.value.rejections} == {
        (Reason.SCATTERED_BLOCK, ("l.slots",)),
        (Reason.UNREADABLE_VIEW, ("l.planes",)),
    }


# ------------------------------------------------------------------------------------------------------ layers that look alike


def together(*worlds: World, layout: str = "NHD") -> World:
    """The layers of several worlds in one group, each in a storage of its own."""
    layers = tuple(
        replace(world.layers[0], name=f"l.{index}", cuts=tuple(replace(cut, storage=f"s{index}") for cut in world.layers[0].cuts))
        for index, world in enumerate(worlds)
    )
    sizes = {f"s{index}": world.storage_bytes["s"] for index, world in enumerate(worlds)}
    group = OfferedGroup(tuple(laid.name for laid in layers), BLOCKS, {laid.name: laid.spec for laid in layers})
    return World((group,), layers, sizes, layout)


def windowed(world: World, tokens: int) -> World:
    """The world with a sliding window."""
    laid = world.layers[0]
    return replace(world, layers=(replace(laid, spec=replace(laid.spec, kind=Kind.SLIDING_WINDOW, sliding_window_tokens=tokens)),))


ALIKE: dict[str, tuple[World, list[tuple[str, ...]]]] = {
    "one stride": (together(*[attention(Page(BF16, LATENT, "BNC", "NC"))] * 3), [("l.0", "l.1", "l.2")]),
    "two strides": (
        together(*[attention(Page(BF16, LATENT, "BNC", "NC"), padding=padding) for padding in (0, 32, 0, 32)]),
        [("l.0", "l.2"), ("l.1", "l.3")],
    ),
    "three strides": (
        together(*[attention(Page(BF16, KV, "BHNC", "NHC"), padding=padding) for padding in (0, 32, 64)]),
        [("l.0",), ("l.1",), ("l.2",)],
    ),
    "two windows": (
        together(*[windowed(attention(Page(BF16, KV, "BHNC", "NHC")), tokens) for tokens in (8, 16, 8)]),
        [("l.0", "l.2"), ("l.1",)],
    ),
    "one shape in K/V-first and in blocks-first memory": (
        together(attention(Page(BF16, KEYS_AND_VALUES, "KBNHC", "KBNHC")), attention(Page(BF16, KEYS_AND_VALUES, "KBNHC", "KNHC"))),
        [("l.0",), ("l.1",)],
    ),
    "one shape in blocks-first and in K/V-first memory": (
        together(attention(Page(BF16, KEYS_AND_VALUES, "KBNHC", "KNHC")), attention(Page(BF16, KEYS_AND_VALUES, "KBNHC", "KBNHC"))),
        [("l.0",), ("l.1",)],
    ),
}


@pytest.mark.parametrize("what", ALIKE)
def test_layers_that_must_be_copied_differently_are_told_apart(what: str) -> None:
    """Layers that look alike to LMCache but step, look back or lie differently get an identity each; the rest stay together."""
    world, groups = ALIKE[what]
    plan = engine_groups(edit(validate(world.offer())))
    judge(world, plan)
    assert [group.layer_names for group in plan.groups] == groups
    assert [layer.rule for layer in plan.layers if layer.rule] == [IDENTITY_SPLIT_VIEW] * sum(len(names) for names in groups[1:])
    # Of one shape and dtype the transfer takes one format, that of the first.
    formats: dict[object, object] = {}
    assert all(
        formats.setdefault((tuple(layer.view.shape), layer.view.dtype), layer.page.format) == layer.page.format for layer in plan.layers
    )
