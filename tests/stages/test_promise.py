"""The promise: whatever is offered, every byte of every block is the block's own, or the layer is refused by name."""

from hypothesis import given, settings
from hypothesis import strategies as st

from stages.edit import edit
from stages.engine_groups import engine_groups
from stages.errors import RegistrationRejected
from stages.model import Plan
from stages.validate import validate
from tests.stages.judge import judge
from tests.stages.worlds import World, alike, arbitrary, served


def planned(world: World, device: str = "meta") -> Plan:
    """The plan of a world, or RegistrationRejected."""
    return engine_groups(edit(validate(world.offer(device))))


@settings(max_examples=150)
@given(served(), st.sampled_from(("cpu", "meta")))
def test_every_layout_an_engine_allocates_is_served_byte_for_byte(world: World, device: str) -> None:
    """Whichever release, layout, kernel block, padding and grouping I run, my worker registers, and each block is its own."""
    judge(world, planned(world, device))


@settings(max_examples=150)
@given(st.one_of(arbitrary(), alike()))
def test_nonsense_is_refused_by_name_or_right(world: World) -> None:
    """Whatever an engine hands over, kvreg never moves a wrong byte: it moves the right ones or names the layers it refuses."""
    try:
        plan = planned(world)
    except RegistrationRejected as refused:
        names = {laid.name for laid in world.layers}
        for rejection in refused.rejections:
            assert rejection.layer_names
            assert set(rejection.layer_names) <= names
            assert rejection.facts
    else:
        judge(world, plan)
