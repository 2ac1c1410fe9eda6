"""engine-group-info: groups, ids, order and fields as LMCache forms them."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch

from stages.edit import edit
from stages.engine_groups import engine_groups
from stages.model import EngineGroup, Exclusion, Kind, LayerCache, LeafSpec, Offer, OfferedGroup, Plan
from stages.validate import validate
from tests.offers import BLOCK, PAGE_BYTES, cache, hybrid
from tests.stages.worlds import Cut, Laid, Page, World, state_spec

STATE_NAMES, ATTENTION_NAMES = ("l.0.state", "l.1.state"), ("l.0.attn", "l.1.attn")
LATENT = Page(torch.bfloat16, {"N": 4, "C": 16}, "BNC", "NC")


def planned(offer: Offer) -> Plan:
    """The plan of an offer."""
    return engine_groups(edit(validate(offer)))


def latent(spec: LeafSpec, **more: Any) -> EngineGroup:
    """The one engine group of one latent layer with this spec."""
    world = World((OfferedGroup(("l.0",), 3, {"l.0": spec}),), (Laid("l.0", spec, (LATENT.cut("s", 0, 128, 3),)),), {"s": 384})
    (group,) = planned(replace(world.offer(), **more)).groups
    return group


def test_groups_say_what_lmcache_asks() -> None:
    """A hybrid worker is two groups under the engine's own ids: one block of state looks back one block, attention for ever."""
    state, attention = planned(hybrid()).groups
    assert (state.engine_group_id, state.layer_names, state.layer_indices) == (0, STATE_NAMES, (0, 2))
    assert (attention.engine_group_id, attention.layer_names, attention.layer_indices) == (1, ATTENTION_NAMES, (1, 3))
    assert (state.tokens_per_block, state.sw_size_tokens, state.recurrent_state) == (BLOCK, BLOCK, True)
    assert (attention.tokens_per_block, attention.sw_size_tokens, attention.recurrent_state) == (BLOCK, -1, False)
    assert (attention.slots_per_block, attention.block_bytes, attention.block_stride_bytes, attention.num_blocks) == (
        BLOCK,
        PAGE_BYTES,
        PAGE_BYTES,
        6,
    )
    assert {state.extra_object_group_tag, attention.extra_object_group_tag} == {0}


def test_groups_come_in_the_order_of_their_first_layer() -> None:
    """Store and retrieve requests index groups by position, so their order is that of registration, not that of ids."""
    offer = hybrid()
    names = ("l.1.attn", "l.0.state", "l.0.attn", "l.1.state")
    plan = planned(replace(offer, caches={name: offer.caches[name] for name in names}))
    assert [(group.engine_group_id, group.layer_names) for group in plan.groups] == [
        (1, ("l.1.attn", "l.0.attn")),
        (0, ("l.0.state", "l.1.state")),
    ]
    assert [plan.layers[index].layer.name for group in plan.groups for index in group.layer_indices] == [
        "l.1.attn",
        "l.0.attn",
        "l.0.state",
        "l.1.state",
    ]


def test_a_rank_without_a_group_s_layers_keeps_the_other_ids() -> None:
    """Under pipeline parallelism a group may be empty on this rank, and block ids of the others still find their own."""
    offer = hybrid()
    plan = planned(replace(offer, groups=(OfferedGroup((), 6, {}), *offer.groups, OfferedGroup((), 6, {}))))
    assert [group.engine_group_id for group in plan.groups] == [1, 2]


def test_a_group_left_out_leaves_a_gap_in_the_ids() -> None:
    """The ids are the scheduler's, whatever is not transferred."""
    offer = hybrid()
    first, second = offer.groups
    plan = planned(replace(offer, groups=(replace(first, transferable=False), second)))
    assert [(group.engine_group_id, group.layer_indices) for group in plan.groups] == [(1, (0, 1))]
    assert [layer.exclusion for layer in plan.excluded] == [Exclusion.NOT_TRANSFERABLE] * 2


@pytest.mark.parametrize(
    ("kind", "window", "told"),
    [
        (Kind.FULL_ATTENTION, None, -1),
        (Kind.FULL_ATTENTION, 64, -1),
        (Kind.MLA_ATTENTION, None, -1),
        (Kind.SLIDING_WINDOW, 64, 64),
        (Kind.SLIDING_WINDOW_MLA, 64, 64),
        (Kind.CHUNKED_LOCAL_ATTENTION, 64, -1),
        (Kind.SINK_FULL_ATTENTION, 64, -1),
    ],
)
def test_only_sliding_windows_are_windows(kind: Kind, window: int | None, told: int) -> None:
    """A window is told for sliding kinds alone: the other kinds may look further back than any number in their spec."""
    assert latent(LeafSpec(kind, 4, 128, 4, sliding_window_tokens=window)).sw_size_tokens == told


@pytest.mark.parametrize(("sharded", "tokens"), [(None, 8), (True, 8), (False, 4)])
def test_context_parallel_ranks_stretch_a_block_of_tokens(sharded: bool | None, tokens: int) -> None:
    """One block id stands for the tokens of all ranks, unless the group is replicated on each."""
    assert latent(LeafSpec(Kind.MLA_ATTENTION, 4, 128, 4, dcp_sharded=sharded), dcp_size=2).tokens_per_block == tokens


def test_recurrent_state_is_whole_on_every_context_parallel_rank() -> None:
    """State is never sharded, so its block stands for as many tokens as on one rank."""
    assert [group.tokens_per_block for group in planned(replace(hybrid(), dcp_size=4)).groups] == [BLOCK, 4 * BLOCK]


def test_compressed_slots_stay_compressed() -> None:
    """Four tokens a slot stay four: LMCache derives the ratio from tokens and slots a block."""
    group = latent(LeafSpec(Kind.MLA_ATTENTION, 16, 128, 4, tokens_per_state=Fraction(4)))
    assert (group.tokens_per_block, group.slots_per_block) == (16, 4)


def test_auxiliary_pools_are_groups_of_their_own_after_the_engine_s() -> None:
    """CacheBlend's pools of one block size share a group, tagged 1, 2, … and unscaled by context-parallel ranks."""
    offer = hybrid()
    pools = {
        name: LayerCache((cache(torch.zeros(5, 4, 6, dtype=torch.uint8)),))
        for name in ("cb.aux_pool.16.a", "cb.aux_pool.4", "cb.aux_pool.16.b")
    }
    plan = planned(replace(offer, caches={**dict(list(pools.items())[:1]), **offer.caches, **pools}, dcp_size=2))
    told = {(group.engine_group_id, group.layer_names, group.tokens_per_block, group.extra_object_group_tag) for group in plan.groups}
    assert told == {
        (0, STATE_NAMES, BLOCK, 0),
        (1, ATTENTION_NAMES, 2 * BLOCK, 0),
        (2, ("cb.aux_pool.16.a", "cb.aux_pool.16.b"), 16, 1),
        (3, ("cb.aux_pool.4",), 4, 2),
    }
    assert [group.slots_per_block for group in plan.groups if group.extra_object_group_tag] == [4, 4]


def test_a_pool_of_more_slots_than_tokens_is_an_opaque_page() -> None:
    """A pool that keeps several slots a token is served as a fractional layer is: a slot a token."""
    offer = hybrid()
    pools = {"cb.aux_pool.2": LayerCache((cache(torch.zeros(5, 4, 6, dtype=torch.uint8)),))}
    group = planned(replace(offer, caches={**offer.caches, **pools})).groups[-1]
    assert (group.tokens_per_block, group.slots_per_block, group.opaque) == (2, 2, True)


# ------------------------------------------------------------------------------------------------------------ fingerprints


def kv(
    memory: str,
    *,
    pages: int = 1,
    slots: int = 4,
    blocks: int = 3,
    start: int = 0,
    padding: int = 0,
    logical: str = "BHNC",
    layout: str = "NHD",
) -> str:
    """The fingerprint of one layer of attention."""
    sizes = {"N": slots, "H": 2, "C": 16} | ({"K": 2} if "K" in logical else {})
    page = Page(torch.bfloat16, sizes, logical, memory, pages)
    step = page.content_bytes + padding
    spec = LeafSpec(Kind.FULL_ATTENTION, page.states, step, page.states)
    laid = Laid("l.0", spec, (page.cut("s", start, step, blocks),), logical.index("B"), pages)
    world = World((OfferedGroup(("l.0",), blocks, {"l.0": spec}),), (laid,), {"s": start + blocks * step}, layout)
    (group,) = planned(world.offer()).groups
    return group.layout_fingerprint


def state(*starts: int) -> str:
    """The fingerprint of two equal states that begin at these bytes of their page."""
    cuts = tuple(Cut("s", torch.int8, (3, 16), (64, 1), start) for start in starts)
    spec = state_spec(4, 64, None, "align")
    world = World((OfferedGroup(("l.0",), 3, {"l.0": spec}),), (Laid("l.0", spec, cuts, listed=True),), {"s": 192})
    (group,) = planned(world.offer()).groups
    return group.layout_fingerprint


def test_equal_pages_have_equal_fingerprints_wherever_they_lie() -> None:
    """How many blocks there are, where a layer begins and how blocks are padded change no byte of a page: entries are shareable."""
    assert kv("NHC") == kv("NHC", blocks=5) == kv("NHC", start=512) == kv("NHC", padding=64, layout="BLNHC")
    assert kv("KBNHC", logical="KBNHC") == kv("KBNHC", logical="KBNHC", blocks=7)
    assert kv("KBHNC", logical="KBNHC", pages=2, layout="HND") == kv("KBHNC", logical="KBNHC", pages=2, layout="HND", blocks=7)


def test_pages_that_merge_into_slots_are_as_if_never_split() -> None:
    """Kernel pages of tokens one after the other are the same bytes as one page, so that engines of both kinds can share."""
    assert kv("NHC", pages=2, slots=4) == kv("NHC", pages=1, slots=8) == kv("NHC", pages=4, slots=2)


def test_another_byte_order_is_another_fingerprint() -> None:
    """Heads before slots, K and V interleaved by kernel page, another kernel block, states swapped: never shared."""
    told = [
        kv("NHC", slots=8),
        kv("HNC", slots=8, layout="HND"),
        kv("HNC", pages=2, slots=4, layout="HND"),
        kv("HNC", pages=4, slots=2, layout="HND"),
        kv("KNHC", logical="BKNHC", slots=8),
        kv("KNHC", logical="BKNHC", slots=4, pages=2),
        kv("KBNHC", logical="KBNHC", slots=8),
        state(0, 16),
        state(16, 0),
        state(0, 32),
    ]
    assert len(set(told)) == len(told)
