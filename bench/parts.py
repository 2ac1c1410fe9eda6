"""Where a registration's time goes: each part by itself, over what LMCache computes on the same input in the same rounds."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.hybrid import hybrid
from bench.measure import Section, compare
from bench.registration import lmcache_alone, logged_to_nowhere, registered
from metrics.events import EventObserver
from metrics.ledger import Ledger
from metrics.prometheus import PrometheusObserver
from orchestrator.engine.observe import observe
from stages.edit import edit
from stages.engine_groups import engine_groups
from stages.model import Edited
from stages.validate import validate

DEPTHS = {96: 51, 1000: 21}
"""Layers, and how many rounds."""

IN_MEMORY = Path("/dev/shm")


def run() -> Section:
    """Both depths, a row a part."""
    rows = [row for depth, rounds in DEPTHS.items() for row in _parts(depth, rounds)]
    return Section(
        "Where its time goes",
        "The same registration in parts. A stage is given what the one before it returned. An observer's part is a whole\n"
        "registration with it alone, less one without any; a ledger is measured in memory and on this machine's disk. One\n"
        "`as_strided` for each layer, which no registration by views can do without, stands among them for scale.",
        ("layers", "part", "takes", "of LMCache's time"),
        rows,
        "An observer's time does not grow with the layers: it is what ten lines of log, a few hundred series and two files cost.",
    )


def _parts(depth: int, rounds: int) -> list[tuple[str, str, str, str]]:
    config, caches = hybrid(depth)
    offer = observe(config, caches, layout="LBNHC")
    theirs = lmcache_alone(config, caches)
    validated = validate(offer)
    edited = edit(validated)

    def measured(work: Callable[[], object]) -> tuple[float, float]:
        both = compare(work, theirs, rounds)
        return both.first_s, both.ratio.middle

    with logged_to_nowhere(), tempfile.TemporaryDirectory(dir=IN_MEMORY) as memory, tempfile.TemporaryDirectory() as disk:
        bare = registered(offer, (), theirs, rounds)
        parts = {
            "validate": measured(lambda: validate(offer)),
            "edit and proof": measured(lambda: edit(validated)),
            "of it, the views themselves": measured(lambda: _views(edited)),
            "engine groups": measured(lambda: engine_groups(edited)),
        }
        observers = {
            "Prometheus registry": PrometheusObserver(),
            "events": EventObserver(),
            "ledger, in memory": Ledger(memory, "bench"),
            "ledger, on disk": Ledger(disk, "bench"),
        }
        for name, observer in observers.items():
            whole = registered(offer, (observer,), theirs, rounds)
            parts[name] = (whole.first_s - bare.first_s, whole.ratio.middle - bare.ratio.middle)
    return [(f"{depth:,}", name, f"{taken_s * 1e6:,.0f} µs", f"{share:.3f}") for name, (taken_s, share) in parts.items()]


def _views(edited: Edited) -> list[object]:
    return [layer.layer.raw.as_strided(layer.paging.shape, layer.paging.stride, 0) for layer in edited.layers]
