"""Many workers registering at once with a backend that takes its time."""

import gc
import time
from pathlib import Path

import anyio
import torch

from bench.measure import Section, Spread, bar
from orchestrator.pipeline import register
from orchestrator.portal import run_sync
from stages.model import CacheTensor, Engine, Kind, LayerCache, LeafSpec, Offer, OfferedGroup, Plan, Receipt, Worker

SIZES = (1, 10, 100, 1000)
ROUNDS, LAYERS, BLOCKS, TOKENS, PAGE_BYTES = 5, 48, 8, 16, 4096
ANSWER_S = 0.1
BAR = 1.5


class Slow:
    """A backend that answers after a while, to everybody at once."""

    name = "slow"

    async def register(self, plan: Plan) -> str:
        """After `ANSWER_S` seconds."""
        await anyio.sleep(ANSWER_S)
        return "slow"

    async def unregister(self, plan: Plan) -> None:
        """Nothing to forget."""


def run() -> Section:
    """1 to 1,000 workers as tasks of one event loop."""
    rows, at_the_bar = [], []
    alone_s = Spread.of(_fleet(1)[0] for _ in range(ROUNDS)).middle
    for size in SIZES:
        fleets = [_fleet(size) for _ in range(ROUNDS)]
        wall_s, memory_kib = Spread.of(fleet[0] for fleet in fleets).middle, Spread.of(fleet[2] for fleet in fleets).middle
        over_slowest = Spread.of(fleet[0] / fleet[1] for fleet in fleets)
        at_the_bar.append(over_slowest.middle)
        computed_ms = max(wall_s - ANSWER_S, 0) / size * 1e3
        over_alone = f"{wall_s / alone_s:.2f}"
        rows.append((f"{size:,}", f"{wall_s:.3f} s", f"{over_slowest:.2f}", over_alone, f"{computed_ms:.2f} ms", f"{memory_kib:.0f} KiB"))
    return Section(
        "Many workers at once",
        f"A worker is one run of the pipeline with {LAYERS} layers of its own, all of them tasks of one event loop in one thread; the\n"
        f"backend takes {ANSWER_S * 1e3:.0f} ms, each wait its own. In a deployment a worker is a process: what is computed here one\n"
        "after the other is computed there side by side, so wall time over that of a worker alone grows here with all of them.\n"
        "The slowest worker is timed from its own start to its receipt, in the same run.",
        ("workers", "wall", "over the slowest worker", "over a worker alone", "computed a worker", "memory a worker"),
        rows,
        bar(f"wall at most {BAR} of the slowest worker's", max(at_the_bar) <= BAR),
    )


def _fleet(size: int) -> tuple[float, float, float]:
    """Wall seconds, the slowest worker's own, and KiB of resident memory for each worker's receipt."""
    offers = [_offer(rank, size) for rank in range(size)]
    gc.collect()
    before = _resident_bytes()
    receipts: list[Receipt] = []
    took_s: list[float] = []

    async def one(offer: Offer) -> None:
        begin = time.perf_counter()
        receipts.append(await register(offer, Slow()))
        took_s.append(time.perf_counter() - begin)

    async def all_at_once() -> float:
        begin = time.perf_counter()
        async with anyio.create_task_group() as workers:
            for offer in offers:
                workers.start_soon(one, offer)
        return time.perf_counter() - begin

    wall_s = run_sync(all_at_once)
    assert len(receipts) == size
    return wall_s, max(took_s), max(_resident_bytes() - before, 0) / size / 1024


def _offer(rank: int, size: int) -> Offer:
    spec = LeafSpec(Kind.MLA_ATTENTION, TOKENS, PAGE_BYTES, TOKENS)
    memory = torch.empty(LAYERS * BLOCKS * PAGE_BYTES, dtype=torch.uint8)
    part = BLOCKS * PAGE_BYTES
    caches = {}
    for layer in range(LAYERS):
        tensor = memory[layer * part : (layer + 1) * part].view(BLOCKS, TOKENS, -1)
        caches[f"layer {layer}"] = LayerCache((CacheTensor(tensor, str(rank), memory.nbytes),))
    groups = (OfferedGroup(tuple(caches), BLOCKS, dict.fromkeys(caches, spec)),)
    return Offer(Engine("bench", "0"), groups, caches, "NHD", worker=Worker(rank, size))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
