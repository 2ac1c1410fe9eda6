"""Pages through the embedded backend, against one `copy_` of as many bytes."""

import random
from functools import partial

import torch

from bench.measure import Section, bar, compare
from orchestrator.backend.embedded import EmbeddedBackend
from orchestrator.pipeline import register
from orchestrator.portal import run_sync
from stages.model import CacheTensor, Engine, Kind, LayerCache, LeafSpec, Offer, OfferedGroup

KIB = 1024
PAGES_KIB = (4, 16, 64, 256, 1024, 4096)
LAYERS, TOKENS, TOTAL_BYTES, ROUNDS = 8, 16, 64 * KIB * KIB, 15
BAR, BAR_FROM_KIB = 0.9, 256


def run() -> Section:
    """Store and retrieve of the same bytes, cut into ever larger blocks, in one thread of torch's and in all."""
    rows, at_the_bar = [], {}
    every = torch.get_num_threads()
    try:
        for threads in sorted({1, every}):
            torch.set_num_threads(threads)
            found, at_the_bar[threads] = _curve(threads)
            rows += found
    finally:
        torch.set_num_threads(every)
    verdicts = [
        bar(f"at least {BAR} for blocks of {BAR_FROM_KIB} KiB and more, torch threads: {threads}", least >= BAR)
        for threads, least in at_the_bar.items()
    ]
    return Section(
        "Copying blocks",
        f"The embedded backend stores {TOTAL_BYTES // KIB // KIB} MiB of {LAYERS} layers, blocks in random order, under keys that\n"
        "hold pages already, and retrieves them; against one `copy_` of as many bytes, tensor to tensor, both long in memory. The\n"
        "ratio is that of bytes a second: 1 is as fast as the one copy. torch divides a copy among its threads from 32,768 elements\n"
        "on, so that with more than one the one long copy has all of them and a block may have one.",
        ("a layer's block", "blocks", "torch threads", "", "kvreg", "one `copy_`", "ratio"),
        rows,
        "\n\n".join(verdicts),
    )


def _curve(threads: int) -> tuple[list[tuple[str, ...]], float]:
    """The rows of all sizes, and the least middle ratio of those that the bar is about."""
    rows, at_the_bar = [], []
    flat, other = torch.zeros(TOTAL_BYTES, dtype=torch.uint8), torch.zeros(TOTAL_BYTES, dtype=torch.uint8)
    for page_kib in PAGES_KIB:
        backend, num_blocks = EmbeddedBackend(), TOTAL_BYTES // (LAYERS * page_kib * KIB)
        offer = _offer(num_blocks, page_kib * KIB)
        registration = run_sync(partial(register, offer, backend)).registration
        ids = random.Random(0).sample(range(num_blocks), num_blocks)
        for what, move in (("store", backend.store), ("retrieve", backend.retrieve)):
            ours = partial(move, registration, 0, ids, ids)
            assert ours() == TOTAL_BYTES
            measured = compare(partial(other.copy_, flat), ours, ROUNDS)
            if page_kib >= BAR_FROM_KIB:
                at_the_bar.append(measured.ratio.middle)
            rates = (f"{TOTAL_BYTES / took_s / 1e9:.1f} GB/s" for took_s in (measured.second_s, measured.first_s))
            rows.append((f"{page_kib:,} KiB", f"{num_blocks:,}", str(threads), what, *rates, f"{measured.ratio:.2f}"))
    return rows, min(at_the_bar)


def _offer(num_blocks: int, page_bytes: int) -> Offer:
    """One group of layers `[NB, N, C]`, each in memory of its own."""
    spec = LeafSpec(Kind.MLA_ATTENTION, TOKENS, page_bytes, TOKENS)
    caches = {}
    for layer in range(LAYERS):
        pages = torch.zeros((num_blocks, TOKENS, page_bytes // TOKENS), dtype=torch.uint8)
        caches[f"layer {layer}"] = LayerCache((CacheTensor(pages, str(layer), pages.nbytes),))
    return Offer(Engine("bench", "0"), (OfferedGroup(tuple(caches), num_blocks, dict.fromkeys(caches, spec)),), caches, "NHD")
