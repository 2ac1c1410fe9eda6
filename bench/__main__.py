"""Two ratios: copying pages through the embedded backend against one flat copy of as many bytes, and the three computing
stages of a registration against only re-viewing the same tensors."""

import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from orchestrator.backend.embedded import EmbeddedBackend
from orchestrator.pipeline import register
from orchestrator.portal import run_sync
from stages.edit import edit
from stages.engine_groups import engine_groups
from stages.model import CacheTensor, Engine, Kind, LayerCache, LeafSpec, Offer, OfferedGroup
from stages.validate import validate

ROUNDS = 9
LAYERS, BLOCKS, TOKENS, KERNEL, HEADS, CONTENT = 48, 64, 128, 64, 2, 256
PAGE_BYTES = TOKENS * HEADS * CONTENT * 2


def main() -> None:
    """Print each ratio with its median times."""
    offer = _offer()
    table = Table(
        "measured", "median", "against", "median", "ratio", title=f"{LAYERS} layers, {BLOCKS} blocks of {PAGE_BYTES} B, {ROUNDS} rounds"
    )
    backend = EmbeddedBackend()
    registration = run_sync(lambda: register(offer, backend)).registration
    ids = list(range(BLOCKS))
    flat = torch.empty(LAYERS * BLOCKS * PAGE_BYTES, dtype=torch.uint8)
    other = torch.empty_like(flat)
    _row(table, "store", lambda: backend.store(registration, 0, ids, ids), "flat copy of as many bytes", lambda: other.copy_(flat))
    _row(table, "retrieve", lambda: backend.retrieve(registration, 0, ids, ids), "flat copy of as many bytes", lambda: other.copy_(flat))
    _row(table, "validate, edit, prove, group", lambda: engine_groups(edit(validate(offer))), "re-view each tensor", lambda: _review(offer))
    Console(width=110).print(table)


def _offer() -> Offer:
    """One group of sub-paged attention: each block two kernel pages."""
    spec = LeafSpec(Kind.FULL_ATTENTION, TOKENS, PAGE_BYTES, TOKENS, PAGE_BYTES)
    caches = {}
    for index in range(LAYERS):
        pages = torch.zeros((BLOCKS * TOKENS // KERNEL, HEADS, KERNEL, CONTENT), dtype=torch.bfloat16)
        caches[f"layer {index}"] = LayerCache((CacheTensor(pages, str(index), pages.untyped_storage().nbytes()),))
    return Offer(Engine("bench", "0"), (OfferedGroup(tuple(caches), BLOCKS, dict.fromkeys(caches, spec)),), caches, "HND")


def _review(offer: Offer) -> None:
    for cache in offer.caches.values():
        cache.tensors[0].tensor.view(BLOCKS, 1, TOKENS, HEADS * CONTENT)


def _row(table: Table, name: str, work: Callable[[], object], against: str, yardstick: Callable[[], object]) -> None:
    ours, theirs = [], []
    for _ in range(ROUNDS):  # in turn, so that both meet the same noise
        ours.append(_seconds(work))
        theirs.append(_seconds(yardstick))
    mine, its = statistics.median(ours), statistics.median(theirs)
    table.add_row(name, f"{mine * 1e3:.2f} ms", against, f"{its * 1e3:.2f} ms", f"{mine / its:.1f}")


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
