"""The border on what the installed vLLM itself plans and allocates, judged by the bytes of its own memory."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from types import ModuleType
from typing import Any

import pytest

from orchestrator.engine.observe import observe
from stages.edit import edit
from stages.engine_groups import engine_groups
from stages.model import Plan
from stages.validate import validate
from tests.compat.blocks import check_blocks
from tests.compat.specs import BLOCK_SIZE, KERNEL_BLOCK_SIZE, STATE_BYTES, build, spec_classes

pytestmark = pytest.mark.engine

NUM_BLOCKS = 9
LAYER_OUTERMOST, BLOCK_OUTERMOST = ("LBNHC", "LBHNC"), ("BLNHC", "BLHNC")
LAYOUTS = LAYER_OUTERMOST + BLOCK_OUTERMOST

Classes = Mapping[str, type]


def _hybrid(classes: Classes) -> dict[str, Any]:
    attention = build(classes["FullAttentionSpec"])
    state = build(classes["MambaSpec"], page_size_padded=attention.page_size_bytes)
    return {f"l.{index}": attention if index % 4 == 3 else state for index in range(8)}


def _alternating(first: str, second: str, count: int) -> Callable[[Classes], dict[str, Any]]:
    return lambda classes: {f"l.{index}": build(classes[second if index % 2 else first]) for index in range(count)}


def _same(name: str, **changes: Any) -> Callable[[Classes], dict[str, Any]]:
    return lambda classes: {f"l.{index}": build(classes[name], **changes) for index in range(3)}


def _packed(classes: Classes) -> dict[str, Any]:
    compressed, window = build(classes["MLAAttentionSpec"], tokens_per_state=4), build(classes["SlidingWindowMLASpec"])
    return {f"l.{index}": window if index % 2 else compressed for index in range(4)}


def _widths(classes: Classes) -> dict[str, Any]:
    return {f"l.{size}": build(classes["FullAttentionSpec"], head_size=size) for size in (32, 48, 64)}


MODELS: dict[str, Callable[[Classes], dict[str, Any]]] = {
    "hybrid": _hybrid,
    "sliding": _alternating("SlidingWindowSpec", "FullAttentionSpec", 5),
    "chunked": _alternating("ChunkedLocalAttentionSpec", "FullAttentionSpec", 4),
    "mla": _same("MLAAttentionSpec"),
    "pooled": _same("FullAttentionSpec", tokens_per_state=Fraction(1, 4)),
    "aligned": _same("FullAttentionSpec", block_stride_alignment=10_000),
    "packed": _packed,
    "widths": _widths,
}


def _plan(planning: ModuleType, model: str, layout: str, kernel_block: int | None = None) -> Plan:
    engine = planning.vllm_config(layout, NUM_BLOCKS)
    (planned,) = planning.configs(engine, [MODELS[model](spec_classes(planning.interface))])
    offer = observe(planned, planning.allocate(planned, kernel_block), vllm_config=engine)
    assert (offer.layout, {group.num_blocks for group in offer.groups}) == (layout, {NUM_BLOCKS})
    return engine_groups(edit(validate(offer)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_planned_memory_is_moved_block_by_block(planning: ModuleType, model: str, layout: str) -> None:
    """Whatever vLLM plans for my model, each block's bytes are moved whole, and no other block's with them."""
    plan = _plan(planning, model, layout)
    assert plan.layers
    assert not plan.excluded
    assert check_blocks(plan) == 3 * sum(layer.layer.owned.size_bytes for layer in plan.layers)


@pytest.mark.parametrize("layout", LAYER_OUTERMOST)
@pytest.mark.parametrize("model", ["hybrid", "sliding", "mla", "pooled"])
def test_kernel_pages_are_moved_as_the_scheduler_counts_them(planning: ModuleType, model: str, layout: str) -> None:
    """My attention backend pages finer than block ids count, and a block still is a block."""
    plan = _plan(planning, model, layout, KERNEL_BLOCK_SIZE)
    assert max(layer.layer.pages_per_block for layer in plan.layers) == BLOCK_SIZE // KERNEL_BLOCK_SIZE
    assert {group.tokens_per_block for group in plan.groups} == {BLOCK_SIZE}
    assert check_blocks(plan) == 3 * sum(layer.layer.owned.size_bytes for layer in plan.layers)


def test_a_hybrid_has_a_group_for_each_of_vllms(planning: ModuleType) -> None:
    """Three groups of states and one of attention stay four, in order, and only a state's own bytes are owned."""
    plan = _plan(planning, "hybrid", "LBNHC", KERNEL_BLOCK_SIZE)
    assert [group.engine_group_id for group in plan.groups] == sorted(group.engine_group_id for group in plan.groups)
    assert [group.recurrent_state for group in plan.groups] == [True, True, True, False]
    assert [group.sw_size_tokens for group in plan.groups] == [BLOCK_SIZE, BLOCK_SIZE, BLOCK_SIZE, -1]
    assert {layer.layer.owned.size_bytes for layer in plan.layers if layer.layer.spec.recurrent} == {STATE_BYTES}


def test_pipeline_ranks_keep_the_engines_group_ids(planning: ModuleType) -> None:
    """Each pipeline rank has some groups' layers only, and both count the groups alike."""
    layers = _hybrid(spec_classes(planning.interface))
    ranks = [dict(list(layers.items())[:3]), dict(list(layers.items())[3:])]
    engine = planning.vllm_config("LBNHC", NUM_BLOCKS)
    seen = set()
    for planned, mine in zip(planning.configs(engine, ranks), ranks, strict=True):
        offer = observe(planned, planning.allocate(planned), vllm_config=engine)
        plan = engine_groups(edit(validate(offer)))
        assert {name for group in plan.groups for name in group.layer_names} == set(mine)
        for group in plan.groups:
            assert set(group.layer_names) <= set(offer.groups[group.engine_group_id].layer_names)
        assert check_blocks(plan) > 0
        seen.add(len(offer.groups))
    assert len(seen) == 1
