"""What a registration computes, against what LMCache computes on the same input: its edits and its group infos."""

import gc
import io
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anyio
import torch

from bench.measure import Compared, Section, bar, compare
from metrics.events import EventObserver
from metrics.ledger import Ledger
from metrics.observer import Observer
from metrics.prometheus import PrometheusObserver
from orchestrator.engine.observe import observe
from orchestrator.logs import LineFormatter
from orchestrator.pipeline import Settings, register
from stages.edit import edit
from stages.engine_groups import engine_groups
from stages.model import Offer, Plan
from stages.validate import validate

DEPTHS = {48: 25, 96: 25, 1000: 9, 10_000: 3}
"""Layers, and how many rounds."""

BAR = 0.25
BAR_AT = (96, 1000)


class Instant:
    """A backend that takes any plan at once."""

    name = "instant"

    async def register(self, plan: Plan) -> str:
        """The plan's name."""
        return "instant"

    async def unregister(self, plan: Plan) -> None:
        """Nothing to forget."""


def run() -> Section:
    """The four depths, each without observers, with the two that live in memory, and with the ledger as well."""
    from bench.hybrid import hybrid  # imports vLLM, which takes seconds

    rows, at_the_bar, per_layer_us = [], [], {}
    with logged_to_nowhere(), tempfile.TemporaryDirectory() as folder:
        for depth, rounds in DEPTHS.items():
            config, caches = hybrid(depth)
            offer = observe(config, caches, layout="LBNHC")
            in_memory = (PrometheusObserver(), EventObserver())
            theirs = lmcache_alone(config, caches)

            def stages(offer: Offer = offer) -> object:
                return engine_groups(edit(validate(offer)))

            def reading(config: Any = config, caches: dict[str, torch.Tensor] = caches) -> object:
                return observe(config, caches, layout="LBNHC")

            alone = compare(stages, theirs, rounds)
            observed = registered(offer, in_memory, theirs, rounds)
            durable = registered(offer, (*in_memory, Ledger(folder, "bench")), theirs, rounds)
            reads = compare(reading, theirs, rounds)
            per_layer_us[depth] = alone.first_s / depth * 1e6
            if depth in BAR_AT:
                at_the_bar.append(durable.ratio.middle)
            for what, measured in (
                ("the stages", alone),
                ("+ Prometheus registry, events", observed),
                ("+ ledger: all observers", durable),
                ("reading vLLM's config (before)", reads),
            ):
                ours, their = (f"{value * 1e3:.2f} ms" for value in (measured.first_s, measured.second_s))
                rows.append((f"{depth:,}", what, ours, their, f"{measured.ratio:.2f}"))
    few, many = list(DEPTHS)[-2:]
    growth = f"{per_layer_us[few]:.1f} µs at {few:,} layers, {per_layer_us[many]:.1f} µs at {many:,}"
    return Section(
        "A registration against LMCache's",
        "validate + edit + proof + groups, against LMCache's `apply_kv_cache_group_edits` + `create_engine_group_infos_from_vllm` on\n"
        "the same vLLM config and tensors: a hybrid, three layers of int8 states to one of attention in four kernel pages a block.\n"
        "Both log to a stream that keeps nothing. A registration with observers is the whole `register` with a backend that answers\n"
        "at once, in an event loop that runs already. A ledger is two files written and renamed on this machine's disk, however many\n"
        "layers. The next section says which part takes how much.",
        ("layers", "kvreg", "takes", "LMCache", "ratio"),
        rows,
        bar(f"at most {BAR} of LMCache's time at {' and '.join(map(str, BAR_AT))} layers, all observers on", max(at_the_bar) <= BAR)
        + f"\n\nThe stages take {growth} for each layer.",
    )


def lmcache_alone(config: Any, caches: dict[str, torch.Tensor]) -> Callable[[], object]:
    """LMCache's edits and group infos on a vLLM config and its tensors."""
    # Imported when it runs: it takes seconds, and other benchmarks do without.
    from lmcache.integration.vllm.kv_cache_group_edits import apply_kv_cache_group_edits
    from lmcache.integration.vllm.kv_cache_groups import create_engine_group_infos_from_vllm

    hints = {"kv_layout": "NHD"}
    return lambda: create_engine_group_infos_from_vllm(config, apply_kv_cache_group_edits(config, caches, hints), hints)


def registered(offer: Offer, observers: Sequence[Observer], theirs: Callable[[], object], rounds: int) -> Compared:
    """Whole registrations, each in the running loop of one thread, against LMCache in the same thread."""
    settings = Settings(observers)
    gc.collect()

    async def turns() -> Compared:
        # `register` suspends only to be cancelled, so it can be driven step by step without leaving this coroutine.
        return compare(lambda: _drive(register(offer, Instant(), settings)), theirs, rounds)

    return anyio.run(turns)


def _drive(coroutine: Any) -> object:
    """Run a coroutine to its end whose every wait is over at once."""
    try:
        while True:
            coroutine.send(None)
    except StopIteration as end:
        return end.value


@contextmanager
def logged_to_nowhere() -> Iterator[None]:
    """Both libraries' records are made and rendered at INFO, and written to a stream in memory that keeps nothing."""

    class Nowhere(io.StringIO):
        def write(self, text: str) -> int:
            return len(text)

    handler = logging.StreamHandler(Nowhere())
    handler.setFormatter(LineFormatter())
    loggers = [
        logging.getLogger("kvreg"),
        *(logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("lmcache")),
    ]
    before = [(logger, logger.handlers, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, handlers, level, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
