"""What LMCache itself reads from our views, and copies through them, is what the plan says."""

import json
import logging
import os
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings

from orchestrator.snapshot import read
from stages.edit import edit
from stages.engine_groups import engine_groups
from stages.errors import RegistrationRejected
from stages.model import Offer, Plan
from stages.validate import validate
from tests.stages.judge import NOBODY, owned, owners, transferred
from tests.stages.worlds import World, alike, served

pytestmark = pytest.mark.lmcache

CASES = Path(__file__).parents[1] / "cases"


@pytest.fixture(scope="module")
def reading() -> Iterator[ModuleType]:
    """`tests.lmcache.reading`, with LMCache quiet: it logs every group of every registration."""
    if find_spec("lmcache") is None:
        if os.environ.get("CI"):
            pytest.fail("LMCache is not installed")
        pytest.skip("LMCache is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # LMCache's imports may warn, and warnings are errors here
        from tests.lmcache import reading
    logging.disable(logging.INFO)
    yield reading
    logging.disable(logging.NOTSET)


def planned(offer: Offer) -> Plan:
    """The plan of an offer, or RegistrationRejected."""
    return engine_groups(edit(validate(offer)))


def taken(world: World) -> bool:
    """Whether LMCache takes a world's specs at all: a block's tokens must be a multiple of its slots."""
    specs = [laid.spec for laid in world.layers]
    return all(spec.recurrent or spec.block_size % spec.slots_per_block == 0 for spec in specs)


def accepted() -> list[Path]:
    """The snapshots that must be accepted."""
    expected = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(CASES.glob("*.expect.json"))]
    return [path.with_name(path.name.replace(".expect", "")) for path, told in expected if told["outcome"] == "accepted"]


def test_lmcache_reads_every_accepted_snapshot_as_planned(reading: ModuleType) -> None:
    """For each registration among the snapshots, LMCache finds the formats, slots, strides, groups and order the plan states."""
    paths = accepted()
    assert paths
    for path in paths:
        reading.Reading(planned(read(path))).check()


@settings(max_examples=100)
@given(served().filter(taken))
def test_lmcache_reads_every_served_layout_as_planned(reading: ModuleType, world: World) -> None:
    """Whatever an engine allocates, LMCache reads our views as the proof assumed."""
    plan = planned(world.offer())
    if plan.layers:
        reading.Reading(plan).check()


@settings(max_examples=80)
@given(alike())
def test_lmcache_tells_layers_apart_that_look_alike(reading: ModuleType, world: World) -> None:
    """Layers of one shape, but of another memory order, stride or window, are as many groups to LMCache as in the plan."""
    try:
        plan = planned(world.offer())
    except RegistrationRejected:
        return
    reading.Reading(plan).check()


@settings(max_examples=80)
@given(served().filter(taken))
def test_lmcache_s_kernels_move_a_block_s_own_bytes(reading: ModuleType, world: World) -> None:
    """A block that LMCache's copy code stores and retrieves into another one is there, byte for byte, and nothing else changed."""
    offer = world.offer("cpu")
    plan = planned(offer)
    server = reading.Reading(plan) if plan.layers else None
    parts = [part for cache in offer.caches.values() for part in cache.tensors]
    memory = {part.storage: torch.empty(0, dtype=torch.uint8).set_(part.tensor.untyped_storage()) for part in parts}
    for index, group in enumerate(plan.groups):
        if server is None or group.num_blocks < 2:
            continue
        for storage in memory.values():
            storage.copy_(torch.randint(0, 256, storage.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(index)))
        before = {key: storage.clone() for key, storage in memory.items()}
        source, target = 0, group.num_blocks - 1
        server.move(index, source, target)
        may_change = {key: torch.zeros(len(storage), dtype=torch.bool) for key, storage in memory.items()}
        for laid in (laid for laid in world.layers if laid.name in group.layer_names):
            storage, own = laid.cuts[0].storage, owned(world, laid, target)
            assert torch.equal(memory[storage][own], before[storage][owned(world, laid, source)]), laid.name
            page = torch.arange(int(own[0]), min(int(own[0]) + laid.spec.page_size_bytes, len(memory[storage])))
            padding = page[owners(world, group.engine_group_id, storage, transferred(world))[page] == NOBODY]
            may_change[storage][own] = may_change[storage][padding] = True
        assert all(torch.equal(memory[key][~may_change[key]], before[key][~may_change[key]]) for key in memory)
