"""validate: each refusal, how it comes about, whom it names, what it tells; and what is left out, and said so."""

import ast
import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from string import Formatter
from typing import Any, TypeAlias

import pytest
import torch

import stages.geometry
import stages.validate
from stages.errors import HINTS, Fact, Reason, RegistrationRejected, Rejection, Stage
from stages.model import CacheTensor, ExcludedLayer, Exclusion, Kind, LayerCache, Layout, LeafSpec, Offer, OfferedGroup, Run
from stages.validate import Refusals, check_groups, validate
from tests.offers import BLOCK, CONTENT, HEADS, KERNEL, PAGE_BYTES, STATE_BYTES, cache, hybrid

BLOCKS = 6
STATES, ATTENTION = ("l.0.state", "l.1.state"), ("l.0.attn", "l.1.attn")


def respecced(offer: Offer, name: str, **changes: Any) -> Offer:
    """The offer with one layer's spec changed."""
    groups = tuple(
        replace(group, specs={**group.specs, name: replace(group.specs[name], **changes)}) if name in group.specs else group
        for group in offer.groups
    )
    return replace(offer, groups=groups)


def regrouped(offer: Offer, index: int, **changes: Any) -> Offer:
    """The offer with one group changed."""
    return replace(offer, groups=tuple(replace(group, **changes) if at == index else group for at, group in enumerate(offer.groups)))


def recached(offer: Offer, name: str, *parts: CacheTensor, listed: bool = False) -> Offer:
    """The offer with one layer's tensors replaced, or a layer added."""
    return replace(offer, caches={**offer.caches, name: LayerCache(parts, listed)})


def cut(offer: Offer, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Offer:
    """The offer with one layer's tensor changed."""
    part = offer.caches[name].tensors[0]
    return recached(offer, name, replace(part, tensor=change(part.tensor)))


def listed_states(conv_step: int = 0, ssm_storage: str | None = None) -> Offer:
    """The offer with layer l.0.state as a list of two states."""
    offer = hybrid()
    memory = offer.caches["l.0.state"].tensors[0]
    raw = memory.tensor
    conv = raw.as_strided((BLOCKS, 2, 16), (PAGE_BYTES + conv_step, 16, 1))
    ssm = raw.as_strided((BLOCKS, STATE_BYTES - 32), (PAGE_BYTES, 1), 32)
    states = (replace(memory, tensor=conv, storage="0"), replace(memory, tensor=ssm, storage=ssm_storage or "0"))
    return recached(offer, "l.0.state", *states, listed=True)


def two_blocks_of_keys_and_values() -> Offer:
    """Rank 5 with two blocks, dims in memory order: `[2, NB, …]` and `[NB, 2, …]` alike."""
    tensor = torch.zeros(2, 2, 4, 2, 8, dtype=torch.uint8)
    spec = LeafSpec(Kind.FULL_ATTENTION, 4, 128, 4)
    return replace(hybrid(), groups=(OfferedGroup(("l.kv",), 2, {"l.kv": spec}),), caches={"l.kv": LayerCache((cache(tensor),))})


def scattered_page() -> Offer:
    """A page of more separate runs than is worth listing."""
    tensor = torch.zeros(2, 128, 80, 2, dtype=torch.uint8)[..., :1]
    spec = LeafSpec(Kind.FULL_ATTENTION, 80, 128 * 80, 80)
    return replace(hybrid(), groups=(OfferedGroup(("l.far",), 2, {"l.far": spec}),), caches={"l.far": LayerCache((cache(tensor),))})


def without(offer: Offer, name: str) -> Offer:
    """The offer without one layer's cache."""
    return replace(offer, caches={key: held for key, held in offer.caches.items() if key != name})


def shrunk(offer: Offer, name: str) -> Offer:
    """The offer where the storage of one layer, and of all that are cut from it, is said to be a byte too small."""
    storage = offer.caches[name].tensors[0].storage
    caches = {
        key: replace(held, tensors=tuple(replace(part, storage_size_bytes=BLOCKS * PAGE_BYTES - 1) for part in held.tensors))
        if held.tensors[0].storage == storage
        else held
        for key, held in offer.caches.items()
    }
    return replace(offer, caches=caches)


def in_both_groups(offer: Offer, name: str) -> Offer:
    """The offer with a layer of group 0 named in group 1 too."""
    first, second = offer.groups
    return regrouped(offer, 1, layer_names=(name, *second.layer_names), specs={name: first.specs[name], **second.specs})


def pool(offer: Offer, name: str, *shape: int) -> Offer:
    """The offer with an auxiliary pool."""
    return recached(offer, name, cache(torch.zeros(shape, dtype=torch.uint8)))


Told: TypeAlias = tuple[int | None, tuple[str, ...], dict[str, Fact]]
"""The group, the layers and the facts of one refusal."""

REFUSED: dict[Reason, tuple[Callable[[], Offer], *tuple[Told, ...]]] = {
    Reason.CROSS_ATTENTION: (lambda: respecced(hybrid(), "l.0.attn", kind=Kind.CROSS_ATTENTION), (1, ("l.0.attn",), {})),
    Reason.ENCODER_ONLY_ATTENTION: (lambda: respecced(hybrid(), "l.1.attn", kind=Kind.ENCODER_ONLY_ATTENTION), (1, ("l.1.attn",), {})),
    Reason.MAMBA_CACHE_MODE: (lambda: hybrid(mode="none"), (0, STATES, {"mode": "none"})),
    Reason.UNKNOWN_KIND: (lambda: respecced(hybrid(), "l.0.attn", kind=Kind.UNKNOWN), (1, ("l.0.attn",), {})),
    Reason.HOST_RESIDENT: (lambda: regrouped(hybrid(), 1, host_resident=True), (1, ATTENTION, {})),
    Reason.LAYER_IN_TWO_GROUPS: (lambda: in_both_groups(hybrid(), "l.0.state"), (1, ("l.0.state",), {"other_group": 0})),
    Reason.LAYER_WITHOUT_CACHE: (lambda: without(hybrid(), "l.1.attn"), (1, ("l.1.attn",), {})),
    Reason.LAYER_WITHOUT_SPEC: (
        lambda: regrouped(hybrid(), 0, specs={"l.0.state": hybrid().groups[0].specs["l.0.state"]}),
        (0, ("l.1.state",), {}),
    ),
    Reason.CACHE_WITHOUT_GROUP: (lambda: recached(hybrid(), "extra", cache(torch.zeros(6, 4, 4))), (None, ("extra",), {})),
    Reason.AUX_POOL_NAME: (lambda: pool(hybrid(), "cb.aux_pool.many.a", 5, 4, 6), (None, ("cb.aux_pool.many.a",), {})),
    Reason.CHUNK_SIZE: (
        lambda: replace(hybrid(), chunk_size_tokens=BLOCK + 1),
        (0, STATES, {"chunk_size_tokens": BLOCK + 1, "tokens_per_block": BLOCK, "smallest_valid_chunk_tokens": BLOCK}),
        (1, ATTENTION, {"chunk_size_tokens": BLOCK + 1, "tokens_per_block": BLOCK, "smallest_valid_chunk_tokens": BLOCK}),
    ),
    Reason.UNKNOWN_LAYOUT: (lambda: replace(hybrid(), layout="NXD"), (None, (), {"layout": "NXD", "known": tuple(Layout)})),
    Reason.SCATTERED_LAYOUT: (
        lambda: replace(hybrid(), layout="BHLNC"),
        (
            None,
            ("l.0.state", "l.0.attn", "l.1.state", "l.1.attn"),
            {"layout": "BHLNC", "served": ("NHD", "HND", "LBNHC", "LBHNC", "BLNHC", "BLHNC")},
        ),
    ),
    Reason.BLOCK_DIM_AMBIGUOUS: (
        two_blocks_of_keys_and_values,
        (0, ("l.kv",), {"shape": (2, 2, 4, 2, 8), "stride": (128, 64, 16, 8, 1), "num_blocks": 2}),
    ),
    Reason.PAGES_PER_BLOCK: (
        lambda: cut(hybrid(), "l.0.attn", lambda raw: raw[:-1]),
        (1, ("l.0.attn",), {"rows": 17, "num_blocks": BLOCKS}),
    ),
    Reason.PAGE_TOO_SMALL: (
        lambda: respecced(hybrid(), "l.0.state", unpadded_page_size_bytes=STATE_BYTES + 1),
        (0, ("l.0.state",), {"block_bytes": STATE_BYTES, "unpadded_page_size_bytes": STATE_BYTES + 1}),
    ),
    Reason.PAGE_TOO_LARGE: (
        lambda: respecced(hybrid(), "l.0.attn", page_size_bytes=PAGE_BYTES - 1),
        (1, ("l.0.attn",), {"block_bytes": PAGE_BYTES, "page_size_bytes": PAGE_BYTES - 1}),
    ),
    Reason.PAST_STORAGE: (
        lambda: shrunk(hybrid(), "l.0.attn"),
        (0, ("l.0.state",), {"end_bytes": BLOCKS * PAGE_BYTES, "storage_bytes": BLOCKS * PAGE_BYTES - 1}),
        (1, ("l.0.attn",), {"end_bytes": BLOCKS * PAGE_BYTES, "storage_bytes": BLOCKS * PAGE_BYTES - 1}),
    ),
    Reason.STATE_STRIDES: (
        lambda: listed_states(conv_step=-16),
        (0, ("l.0.state",), {"page_stride_bytes": (PAGE_BYTES - 16, PAGE_BYTES)}),
    ),
    Reason.STATES_APART: (
        lambda: listed_states(ssm_storage="elsewhere"),
        (0, ("l.0.state",), {"storages": ("0", "elsewhere"), "pages_per_block": (1, 1)}),
    ),
    Reason.SCATTERED_BLOCK: (scattered_page, (0, ("l.far",), {"runs": 128 * 80})),
}


def refusals(offer: Offer) -> tuple[Rejection, ...]:
    """What validate refuses of an offer."""
    with pytest.raises(RegistrationRejected) as caught:
        validate(offer)
    return caught.value.rejections


def named(rejections: Iterable[Rejection]) -> tuple[str, ...]:
    """The layers that are named, each once, in the order they are."""
    return tuple(dict.fromkeys(name for rejection in rejections for name in rejection.layer_names))


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_served_is_refused_by_name_with_facts_and_a_way_out(reason: Reason) -> None:
    """Whatever is wrong with an offer, I read which layers, of which group, why, by which numbers, and what to do."""
    make, *told = REFUSED[reason]
    rejections = refusals(make())
    assert rejections == tuple(Rejection(Stage.VALIDATE, reason, None, *each) for each in told)
    for rejection in rejections:
        assert {name for _, name, _, _ in Formatter().parse(HINTS[reason]) if name} <= rejection.facts.keys()
        assert rejection.message.count("\n") == 0
        assert reason in rejection.message
        assert len(rejection.hint) > 20


def test_every_reason_that_validate_gives_is_shown_above() -> None:
    """A refusal that nobody has seen come about is not one: each reason that the stage and its geometry name is in the table."""
    given = {
        node.attr
        for module in (stages.validate, stages.geometry)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Reason"
    }
    assert given == {reason.name for reason in REFUSED}


def test_all_that_is_wrong_is_told_at_once() -> None:
    """I fix an offer once: an unknown layout, a bad mode, a lost cache, an orphan and a bad chunk come in one error."""
    offer = replace(
        recached(without(hybrid(mode="none"), "l.1.attn"), "extra", cache(torch.zeros(6, 4, 4))), layout="NXD", chunk_size_tokens=5
    )
    found = {(rejection.reason, rejection.group): rejection.layer_names for rejection in refusals(offer)}
    assert found == {
        (Reason.MAMBA_CACHE_MODE, 0): STATES,
        (Reason.CHUNK_SIZE, 0): STATES,
        (Reason.CHUNK_SIZE, 1): ATTENTION,
        (Reason.UNKNOWN_LAYOUT, None): (),
        (Reason.CACHE_WITHOUT_GROUP, None): ("extra",),
        (Reason.LAYER_WITHOUT_CACHE, 1): ("l.1.attn",),
    }


def test_every_bad_layer_is_named_whatever_comes_before_it() -> None:
    """A group that is left out, a wrong tensor or a wrong pool does not hide the ones after it."""
    left_out = regrouped(respecced(hybrid(), "l.1.attn", kind=Kind.UNKNOWN), 0, transferable=False)
    assert [(refusal.reason, refusal.layer_names) for refusal in refusals(left_out)] == [(Reason.UNKNOWN_KIND, ("l.1.attn",))]
    short = cut(cut(hybrid(), "l.0.state", lambda raw: raw[:-1]), "l.1.attn", lambda raw: raw[:-1])
    assert named(refusals(short)) == ("l.0.state", "l.1.attn")
    pools = pool(pool(pool(hybrid(), "cb.aux_pool.x", 5, 4, 6), "cb.aux_pool.4", 5, 4, 6), "cb.aux_pool.0", 5, 4, 6)
    (rejection,) = refusals(replace(pools, chunk_size_tokens=BLOCK))
    assert (rejection.reason, rejection.layer_names) == (Reason.AUX_POOL_NAME, ("cb.aux_pool.x", "cb.aux_pool.0"))


def test_groups_alone_tell_what_needs_no_tensor() -> None:
    """Before any memory is allocated, kinds, modes, residency and chunk size are already known, and already refused."""
    offer = replace(regrouped(hybrid(mode="none"), 1, host_resident=True), caches={}, chunk_size_tokens=7)
    found = Refusals()
    check_groups(offer, found)
    with pytest.raises(RegistrationRejected) as caught:
        found.raise_if_any()
    assert {rejection.reason for rejection in caught.value.rejections} == {Reason.MAMBA_CACHE_MODE, Reason.HOST_RESIDENT, Reason.CHUNK_SIZE}


def test_before_there_are_caches_the_groups_alone_are_answered() -> None:
    """A refusal at the connector's start replays as it was: no layer is blamed for a cache that did not exist yet."""
    started = replace(respecced(hybrid(mode="none"), "l.0.attn", kind=Kind.CROSS_ATTENTION), caches={}, chunk_size_tokens=BLOCK)
    assert {refusal.reason for refusal in refusals(started)} == {Reason.MAMBA_CACHE_MODE, Reason.CROSS_ATTENTION}
    (chunk,) = {refusal.reason for refusal in refusals(replace(hybrid(), caches={}, chunk_size_tokens=BLOCK + 1))}
    assert chunk is Reason.CHUNK_SIZE
    assert {refusal.reason for refusal in refusals(replace(hybrid(), caches={}))} == {Reason.LAYER_WITHOUT_CACHE}


def test_the_smallest_valid_chunk_is_a_multiple_of_every_group_of_all_ranks() -> None:
    """The chunk I am told to set fits attention over all context-parallel ranks, recurrent state, and auxiliary pools."""
    offer = replace(pool(hybrid(), "cb.aux_pool.32", 5, 4, 6), dcp_size=2, chunk_size_tokens=BLOCK)
    rejections = refusals(offer)
    assert named(rejections) == (*ATTENTION, "cb.aux_pool.32")
    assert {rejection.facts["smallest_valid_chunk_tokens"] for rejection in rejections} == {96}
    assert validate(replace(offer, chunk_size_tokens=96)).layers


@pytest.mark.parametrize("tokens", ["0", "-4", "4.5x", "x4", "", "4 "])
def test_an_auxiliary_pool_says_its_tokens_in_its_name(tokens: str) -> None:
    """A pool whose name holds no positive number of tokens is refused for its name alone."""
    name = f"cb.aux_pool.{tokens}"
    if tokens == "4.5x":
        assert validate(pool(hybrid(), name, 5, 4, 6)).layers[-1].tokens_per_block == 4  # the rest is a label
        return
    (rejection,) = refusals(pool(hybrid(), name, 5, 4, 6))
    assert (rejection.reason, rejection.layer_names) == (Reason.AUX_POOL_NAME, (name,))


def test_an_auxiliary_pool_is_a_group_by_the_tokens_in_its_name() -> None:
    """Pools of as many tokens share a group after the engine's; the rest of a name is a label; a page is its slots' bytes."""
    names = ("cb.aux_pool.4.a.b", "cb.aux_pool.16", "cb.aux_pool.4")
    offer = hybrid()
    for name in names:
        offer = recached(offer, name, cache(torch.zeros(5, 4, 6, dtype=torch.bfloat16)))
    pools = validate(replace(offer, dcp_size=2)).layers[4:]
    spec = LeafSpec(Kind.MLA_ATTENTION, 4, 4 * 6 * 2, 4, dcp_sharded=False)
    assert [(layer.name, layer.group, layer.spec) for layer in pools] == [
        (names[0], 2, spec),
        (names[1], 3, replace(spec, block_size=16)),
        (names[2], 2, spec),
    ]
    assert [layer.owned.num_blocks for layer in pools] == [5] * 3


@pytest.mark.parametrize("shape", [(), (5,), (5, 24), (5, 4, 6, 1)])
def test_an_auxiliary_pool_is_blocks_slots_width(shape: tuple[int, ...]) -> None:
    """A pool of any other rank has no slots that LMCache and we would agree on."""
    (rejection,) = refusals(pool(hybrid(), "cb.aux_pool.4", *shape))
    assert (rejection.reason, rejection.layer_names) == (Reason.AUX_POOL_NAME, ("cb.aux_pool.4",))


# ------------------------------------------------------------------------------------------------------- what is left out


def excluded(offer: Offer) -> tuple[ExcludedLayer, ...]:
    """What validate leaves out of an offer it accepts."""
    return validate(offer).excluded


def test_groups_not_to_be_transferred_are_left_out_and_never_judged() -> None:
    """A group whose transfer the engine turned off may hold anything, in host memory too: it is left out, and said so."""
    offer = regrouped(respecced(hybrid(), "l.0.attn", kind=Kind.UNKNOWN), 1, transferable=False, host_resident=True)
    assert excluded(offer) == tuple(ExcludedLayer(name, 1, Exclusion.NOT_TRANSFERABLE) for name in ATTENTION)
    assert [layer.name for layer in validate(offer).layers] == list(STATES)


def test_scratch_is_what_no_leaf_of_its_group_keeps() -> None:
    """A group is scratch only if every leaf is: one layer with a reusable prefix keeps the whole group in the transfer."""
    one = respecced(hybrid(), "l.0.attn", prefix_cacheable=False)
    assert excluded(one) == ()
    both = respecced(one, "l.1.attn", prefix_cacheable=False)
    assert excluded(both) == tuple(ExcludedLayer(name, 1, Exclusion.SCRATCH) for name in ATTENTION)


def test_a_cache_that_aliases_its_owner_is_left_out_as_shared() -> None:
    """A KV-sharing layer is in no group; its owner's transfer moves its bytes, whatever dims it shows them by."""
    offer = hybrid()
    owner = offer.caches["l.0.attn"]
    other_view = owner.tensors[0].tensor.transpose(1, 2)
    offer = recached(recached(offer, "l.8.attn", *owner.tensors), "l.9.attn", replace(owner.tensors[0], tensor=other_view))
    assert excluded(offer) == tuple(ExcludedLayer(name, None, Exclusion.SHARED) for name in ("l.8.attn", "l.9.attn"))


def test_what_is_left_out_is_told_in_the_order_of_registration() -> None:
    """Aliases, scratch and groups turned off come as the caches do; a layer that has no cache to register comes last."""
    offer = hybrid()
    alias = offer.caches["l.0.attn"]
    names = ("l.1.state", "l.9.attn", "l.0.attn", "l.0.state", "l.1.attn")
    offer = replace(offer, caches={name: alias if name == "l.9.attn" else offer.caches[name] for name in names})
    off = regrouped(offer, 0, layer_names=("none", "l.0.state", "l.1.state"), transferable=False)
    assert [(layer.name, layer.group, layer.exclusion) for layer in excluded(off)] == [
        ("l.1.state", 0, Exclusion.NOT_TRANSFERABLE),
        ("l.9.attn", None, Exclusion.SHARED),
        ("l.0.state", 0, Exclusion.NOT_TRANSFERABLE),
        ("none", 0, Exclusion.NOT_TRANSFERABLE),
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw[:-1],
        lambda raw: raw.as_strided((raw.shape[0] - 1, *raw.shape[1:]), raw.stride(), 1),
        lambda raw: raw[:, :1],
        lambda raw: raw[1:],
        lambda raw: raw.as_strided((raw.shape[0], 2, *raw.shape[2:]), (raw.stride(0), 0, *raw.stride()[2:])),
    ],
)
def test_a_cache_that_aliases_only_part_of_a_layer_is_an_orphan(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """An alias by any other bytes than an owner's would be moved by nobody."""
    offer = hybrid()
    part = offer.caches["l.0.attn"].tensors[0]
    (rejection,) = refusals(recached(offer, "l.9.attn", replace(part, tensor=change(part.tensor))))
    assert (rejection.reason, rejection.layer_names) == (Reason.CACHE_WITHOUT_GROUP, ("l.9.attn",))


@pytest.mark.parametrize("layout", ["NHD", None])
def test_a_layer_of_empty_blocks_is_refused(layout: str | None) -> None:
    """A tensor that holds no byte a block was not made for this group, even where its spec does not say how many it should."""
    offer = cut(respecced(hybrid(), "l.0.attn", unpadded_page_size_bytes=None), "l.0.attn", lambda raw: raw[:, :, :0])
    (rejection,) = refusals(replace(offer, layout=layout))
    assert (rejection.reason, rejection.layer_names, rejection.facts["block_bytes"]) == (Reason.PAGE_TOO_SMALL, ("l.0.attn",), 0)


def test_an_empty_group_is_nothing_to_complain_about() -> None:
    """A pipeline-parallel rank that holds no layer of a group registers its others under their own ids."""
    offer = hybrid()
    validated = validate(replace(offer, groups=(OfferedGroup((), BLOCKS, {}), *offer.groups)))
    assert {(layer.name, layer.group) for layer in validated.layers} == {(name, 1) for name in STATES} | {(name, 2) for name in ATTENTION}


# ------------------------------------------------------------------------------------------------------------- the layout


@pytest.mark.parametrize("layout", ["NHD", "HND", "LBNHC", "LBHNC"])
def test_an_engine_that_names_no_layout_is_read_by_its_strides(layout: str) -> None:
    """Where the engine did not say, heads outside slots mean HND, slots outside heads NHD."""
    told = validate(replace(hybrid(layout=layout), layout=None)).layout
    assert told is (Layout.HND if layout in ("HND", "LBHNC") else Layout.NHD)


def told(shape: tuple[int, ...], order: str, states: int = 4, kind: Kind = Kind.FULL_ATTENTION) -> Layout:
    """The layout of a layer whose engine named none; `order` lists its dims from the outermost in memory."""
    dims = sorted(range(len(shape)), key=lambda dim: order.index("abcde"[dim]))
    tensor = torch.zeros(tuple(shape[dim] for dim in dims)).permute(tuple(dims.index(dim) for dim in range(len(shape))))
    spec = LeafSpec(kind, states, 1 << 20, states, mamba_cache_mode="align")
    layer = OfferedGroup(("l",), 3, {"l": spec})
    return validate(replace(hybrid(), groups=(layer,), caches={"l": LayerCache((cache(tensor),))}, layout=None)).layout


@pytest.mark.parametrize(
    ("shape", "order", "layout"),
    [
        ((3, 2, 4, 8), "acbd", Layout.NHD),
        ((3, 2, 4, 8), "abcd", Layout.HND),
        ((3, 2, 4, 2, 8), "abcde", Layout.NHD),
        ((3, 2, 4, 2, 8), "abdce", Layout.HND),
        ((2, 3, 4, 2, 8), "abcde", Layout.NHD),
        ((2, 3, 4, 2, 8), "abdce", Layout.HND),
        ((3, 2, 2, 8), "abcd", Layout.HND),  # two slots a kernel page
        ((3, 2, 3, 8), "abcd", Layout.NHD),  # 3 divides no 4: these are no slots
        ((3, 1, 4, 8), "abcd", Layout.NHD),  # one head says nothing
        ((3, 2, 1, 8), "abcd", Layout.NHD),  # nor does one slot
        ((3, 4, 8), "abc", Layout.NHD),  # nor a page without heads
    ],
)
def test_heads_are_told_from_slots_by_their_strides(shape: tuple[int, ...], order: str, layout: Layout) -> None:
    """Both ranks that have heads and slots tell their order, whichever dim counts blocks; a page without either says nothing."""
    assert told(shape, order) is layout


def test_recurrent_state_tells_no_layout() -> None:
    """The dims of a state are neither heads nor slots."""
    assert told((3, 2, 4, 8), "abcd", kind=Kind.MAMBA) is Layout.NHD


def test_the_first_layer_that_tells_says_the_layout() -> None:
    """State, and layers that have no cache, are passed over on the way to the first attention that tells."""
    offer = hybrid(layout="HND")
    first = replace(offer.groups[0], layer_names=("none", *offer.groups[0].layer_names), transferable=False)
    attention = offer.groups[1].specs["l.0.attn"]
    first = replace(first, specs={"none": attention, **first.specs})
    assert validate(replace(offer, groups=(first, offer.groups[1]), layout=None)).layout is Layout.HND


# ------------------------------------------------------------------------------------------------- layers that differ little


def two_states(offset: int, shape: tuple[int, ...], stride: tuple[int, ...], storage: str, dtype: torch.dtype) -> LayerCache:
    """16 values in the first bytes of each page, and a second state as told."""
    memory = torch.zeros(2 * BLOCKS * PAGE_BYTES, dtype=torch.uint8)
    first = memory.view(torch.bfloat16).as_strided((BLOCKS, 16), (PAGE_BYTES // 2, 1))
    second = memory.view(dtype).as_strided(shape, stride, offset)
    return LayerCache((CacheTensor(first, "0", memory.nbytes), CacheTensor(second, storage, memory.nbytes)), listed=True)


def looked_into(*layers: LayerCache) -> list[object]:
    """What the blocks of each of these layers of one group and spec own, or why some are refused."""
    caches = {f"l.{index}": layer for index, layer in enumerate(layers)}
    spec = LeafSpec(Kind.MAMBA, BLOCK, PAGE_BYTES, 1, mamba_cache_mode="align")
    offer = replace(hybrid(), groups=(OfferedGroup(tuple(caches), BLOCKS, dict.fromkeys(caches, spec)),), caches=caches)
    try:
        return [layer.owned.runs for layer in validate(offer).layers]
    except RegistrationRejected as caught:
        return [rejection.reason for rejection in caught.rejections]


SECOND: dict[str, Any] = {
    "offset": 16,
    "shape": (BLOCKS, 12),
    "stride": (PAGE_BYTES // 2, 1),
    "storage": "0",
    "dtype": torch.bfloat16,
}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"offset": 20}, [(Run(0, 32), Run(40, 64))]),
        ({"shape": (BLOCKS, 8)}, [(Run(0, 48),)]),
        ({"stride": (PAGE_BYTES // 2, 2)}, [(Run(0, 34), *(Run(start, start + 2) for start in range(36, 80, 4)))]),
        ({"storage": "1"}, [Reason.STATES_APART]),
        ({"offset": 8, "dtype": torch.float32}, [Reason.STATE_STRIDES]),
    ],
)
def test_a_layer_that_differs_in_its_second_state_is_looked_into(change: dict[str, Any], found: list[object]) -> None:
    """Layers are looked into once only where they are alike to the last state: place, shape, stride, storage and dtype."""
    plain, other = two_states(**SECOND), two_states(**{**SECOND, **change})
    assert looked_into(plain, plain) == [(Run(0, 56),)] * 2
    assert looked_into(plain, other) == ([] if isinstance(found[0], Reason) else [(Run(0, 56),)]) + found


def test_every_served_layout_is_known_by_its_name() -> None:
    """Each layout whose block is one run per layer is served; the two others are refused by the engine's own name."""
    for layout in Layout:
        offer = replace(hybrid(), layout=layout.name)
        if layout in (Layout.LHBNC, Layout.BHLNC):
            assert {rejection.reason for rejection in refusals(offer)} == {Reason.SCATTERED_LAYOUT}
        else:
            assert validate(offer).layout is layout


def test_the_shapes_the_tests_lean_on() -> None:
    """The offers of these tests are what their comments say: three kernel pages a block, and padded state."""
    layers = {layer.name: layer for layer in validate(hybrid()).layers}
    assert layers["l.0.attn"].raw.shape == (BLOCKS * 3, HEADS, KERNEL, CONTENT)
    assert (layers["l.0.attn"].pages_per_block, layers["l.0.attn"].owned.size_bytes) == (3, PAGE_BYTES)
    assert (layers["l.0.state"].owned.size_bytes, layers["l.0.state"].owned.stride_bytes) == (STATE_BYTES, PAGE_BYTES)
