"""The promise: whatever is offered, every byte of every block comes back and no other changes, or the layer is refused by name.

`make fuzz` draws from the same workers by the ten thousand.
"""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

import orchestrator.pipeline
import stages.edit
import stages.rules.rule
import stages.validate
from stages.edit import edit
from stages.engine_groups import engine_groups
from stages.model import Layer, Layout
from stages.rules.rule import Edit, Rule, opaque_view
from stages.validate import validate
from tests.stages.bytes_back import promise_kept
from tests.stages.judge import judge
from tests.stages.spoiled import spoiled
from tests.stages.worlds import World, alike, arbitrary, served


@settings(max_examples=120)
@given(served())
def test_every_layout_an_engine_allocates_is_served_byte_for_byte(world: World) -> None:
    """Whichever release, layout, kernel block, padding and grouping I run, my worker registers, and each block comes back."""
    assert promise_kept(world) == ()


@settings(max_examples=120)
@given(st.one_of(spoiled(), arbitrary(), alike()))
def test_nonsense_is_refused_by_name_or_right(world: World) -> None:
    """Whatever an engine hands over, kvreg never moves a wrong byte: it moves the right ones or names the layers it refuses."""
    promise_kept(world)


@settings(max_examples=30)
@given(served())
def test_a_plan_on_metadata_alone_is_right_too(world: World) -> None:
    """What `kvreg check` says of a snapshot, without any memory, holds byte for byte."""
    judge(world, engine_groups(edit(validate(world.offer("meta")))))


# --------------------------------------------------------------------------------------------------------- it can be broken


def one_element_on(layer: Layer, layout: Layout) -> Edit:
    """A block's bytes from its second element on."""
    view = opaque_view(layer, layout).view
    return Edit(view.as_strided(view.shape, view.stride(), view.storage_offset() + 1))


def half_of_each_slot(layer: Layer, layout: Layout) -> Edit:
    """The first half of a block's bytes, as slots half as wide."""
    view = opaque_view(layer, layout).view
    width = max(view.shape[-1] // 2, 1)
    inner = (view.shape[2] * width, width) if view.shape[1] > 1 else (width * view.shape[2], width)
    return Edit(view.as_strided((*view.shape[:3], width), (view.stride(0), *inner, 1)))


def unproven(patch: pytest.MonkeyPatch) -> None:
    """The proof says yes to everything."""
    patch.setattr(stages.edit, "prove", lambda layer, page: None)
    patch.setattr(stages.rules.rule, "prove", lambda layer, page: None)


def with_rule(patch: pytest.MonkeyPatch, apply: Callable[[Layer, Layout], Edit]) -> None:
    """One rule that matches whatever has blocks, before all others, and a proof that says yes."""
    unproven(patch)
    rule = Rule("lying-view", "wrong", lambda layer, _: layer.owned.num_blocks > 1 and len(layer.owned.runs) == 1, apply)
    patch.setattr(orchestrator.pipeline, "edit", lambda validated, rules: edit(validated, (rule, *rules)))


LIES: dict[str, tuple[st.SearchStrategy[World], Callable[[pytest.MonkeyPatch], None]]] = {
    "no proof": (st.one_of(spoiled(), arbitrary()), unproven),
    "a view that begins too late": (served(), lambda patch: with_rule(patch, one_element_on)),
    "a view that ends too early": (served(), lambda patch: with_rule(patch, half_of_each_slot)),
    "layers that lie on each other": (arbitrary(), lambda patch: patch.setattr(stages.edit, "overlapping", lambda layers: ())),
    "layers that look alike": (
        alike(),
        lambda patch: patch.setattr(stages.edit, "_told_apart", lambda layer, paging, layout, taken: paging),
    ),
    "a storage that is too small": (
        spoiled(),
        lambda patch: (unproven(patch), patch.setattr(stages.validate, "_check_storages", lambda layers, refusals: None)),
    ),
    "a refusal of what must be served": (served(), lambda patch: patch.setattr(stages.validate, "REUSABLE_MAMBA_MODES", {"all"})),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_found(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The promise is put to a test that can fail: where part of the proof is missing, or a rule is wrong, it is seen to be broken."""
    worlds, tell = LIES[lie]
    tell(monkeypatch)
    must_be_served = lie == "a refusal of what must be served"

    def broken(world: World) -> bool:
        try:
            return promise_kept(world) != () and must_be_served
        except (AssertionError, RuntimeError):
            return True

    quick = settings(max_examples=500, phases=[Phase.generate], database=None, suppress_health_check=HealthCheck)
    assert find(worlds, broken, settings=quick)
