"""Registration on CUDA tensors: every view a view, nothing copied, nothing waited for, every byte back.

`make gpu` runs them; on a machine whose torch is a CUDA build and that has no `.venv`: `python -m pytest -m gpu tests/gpu`.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from orchestrator import snapshot
from orchestrator.backend.embedded import EmbeddedBackend
from orchestrator.pipeline import register
from orchestrator.portal import run_sync
from stages.edit import edit
from stages.engine_groups import engine_groups
from stages.errors import RegistrationRejected
from stages.model import CacheTensor, LayerCache, Offer, Plan
from stages.rules import RULES
from stages.validate import validate
from tests.offers import block_bytes, fill, hybrid

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
CASES = sorted((Path(__file__).parents[1] / "cases").glob("[0-9]*.json"))


def on_device(offer: Offer) -> Offer:
    """The same geometry over real device memory, storages shared as they were."""
    storages = {part.storage: part.storage_size_bytes for cache in offer.caches.values() for part in cache.tensors}
    memory = {name: torch.zeros(-(-size // 16) * 16, dtype=torch.uint8, device=DEVICE) for name, size in storages.items()}

    def placed(part: CacheTensor) -> CacheTensor:
        tensor = part.tensor
        view = memory[part.storage].view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return replace(part, tensor=view)

    caches = {name: LayerCache(tuple(map(placed, cache.tensors)), cache.listed) for name, cache in offer.caches.items()}
    return replace(offer, caches=caches)


def planned(offer: Offer) -> Plan:
    """The offer through the three stages that compute."""
    return engine_groups(edit(validate(offer)))


@pytest.fixture(scope="module")
def offers() -> list[Offer]:
    """Every sample registration that is accepted, on the device."""
    accepted = []
    for path in CASES:
        if path.name.endswith(".expect.json"):
            continue
        offer = snapshot.read(path)
        try:
            planned(offer)
        except RegistrationRejected:
            continue
        accepted.append(on_device(offer))
    return accepted


def test_every_rule_returns_views_of_the_engines_memory(offers: list[Offer]) -> None:
    """Over all samples every rule that samples call for applies, and each view lies in its raw tensor's storage."""
    applied = set()
    for offer in offers:
        for layer in planned(offer).layers:
            assert layer.view.device.type == DEVICE
            assert layer.view.untyped_storage().data_ptr() == layer.layer.raw.untyped_storage().data_ptr()
            applied.add(layer.rule)
    assert {"mamba-page-view", "mamba-unified-view", "subpaged-attention-view", "subpaged-mla-attention-view"} <= applied
    assert applied - {None} <= {rule.name for rule in RULES} | {"identity-split-view"}


def test_no_stage_allocates_copies_launches_or_waits(offers: list[Offer]) -> None:
    """Under the profiler the stages make no CUDA call at all: no kernel, no copy, no allocation, no synchronisation."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as profile:
            for offer in offers:
                planned(offer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    # The profiler itself waits for the device once, when it stops.
    calls = [event.key for event in profile.key_averages() if event.key.startswith("cuda") and event.key != "cudaDeviceSynchronize"]
    assert calls == []
    assert not any(event.key.startswith(("aten::copy_", "aten::clone", "Memcpy", "aten::contiguous")) for event in profile.key_averages())


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("group", [0, 1])
def test_blocks_come_back_byte_for_byte(layout: str, group: int) -> None:
    """Stored from device memory, overwritten there, retrieved into other blocks: the same bytes, and no others touched."""
    backend = EmbeddedBackend()
    offer = hybrid(layout=layout, device=DEVICE)
    registration = run_sync(lambda: register(offer, backend)).registration
    fill(offer, 1)
    wanted = [block_bytes(offer, group, block) for block in (1, 4)]
    backend.store(registration, group, [1, 4], ["a", "b"])
    fill(offer, 2)
    others = {block: block_bytes(offer, group, block) for block in (1, 2, 3, 4)}
    backend.retrieve(registration, group, [5, 0], ["a", "b"])
    assert [block_bytes(offer, group, block) for block in (5, 0)] == wanted
    assert {block: block_bytes(offer, group, block) for block in others} == others


@pytest.mark.parametrize("nested", [False, True])
def test_the_callers_device_is_current_where_the_work_runs(nested: bool) -> None:
    """Also in the thread of its own that a running event loop calls for."""
    device = torch.cuda.device_count() - 1

    async def current() -> int:
        return torch.cuda.current_device()

    async def caller() -> int:
        return run_sync(current)

    with torch.cuda.device(device):
        assert (asyncio.run(caller()) if nested else run_sync(current)) == device
