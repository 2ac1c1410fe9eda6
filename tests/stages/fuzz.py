"""Workers of all kinds against the promise, on real memory: `python -m tests.stages.fuzz [how many]`.

Half of them are what an engine allocates and must be served; half are not, and must be refused or be right. Exit code 0 if
the promise was kept and, of a full run, every trait was drawn.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from tests.stages.bytes_back import promise_kept
from tests.stages.spoiled import spoiled
from tests.stages.traits import TRAITS, traits
from tests.stages.worlds import World, alike, arbitrary, served

FULL = 20_000
PART = 500
"""Workers drawn in one go."""


@dataclass
class Tally:
    """What was drawn and what became of it."""

    drawn: Counter[str] = field(default_factory=Counter)
    """By half, `valid` and `other`."""
    accepted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    """Workers by reason; one may be refused for several."""
    covered: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """By half, trait and value."""

    def add(self, other: "Tally") -> None:
        """Count what another one counted."""
        for name in ("drawn", "accepted", "refused", "covered"):
            getattr(self, name).update(getattr(other, name))

    def count(self, half: str, world: World) -> None:
        """Put one worker to the test. Raises AssertionError, or whatever else is not a refusal."""
        reasons = promise_kept(world)
        assert half == "other" or not reasons, f"refused, and must be served: {reasons}"
        self.drawn[half] += 1
        self.accepted[half] += not reasons
        self.refused.update(set(reasons))
        self.covered.update((half, *trait) for trait in traits(world))


def part(half: str, examples: int) -> Tally:
    """So many workers of one half, drawn and tested; the smallest failing one is printed by hypothesis."""
    torch.set_num_threads(1)
    tally, worlds = Tally(), served() if half == "valid" else st.one_of(spoiled(), spoiled(), arbitrary(), alike())

    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        print_blob=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=HealthCheck,
    )
    @given(worlds)
    def put_to_the_test(world: World) -> None:
        tally.count(half, world)

    put_to_the_test()
    return tally


def parts(examples: int) -> Iterator[tuple[str, int]]:
    """Both halves in parts."""
    for half in ("valid", "other"):
        yield from ((half, min(PART, examples // 2 - done)) for done in range(0, examples // 2, PART))


def main(examples: int) -> int:
    """Test so many workers on all cores this process may use, and print what they were and what became of them."""
    console = Console()
    begin, tally = time.monotonic(), Tally()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        for done in as_completed([pool.submit(part, *one) for one in parts(examples)]):
            if failure := done.exception():
                pool.shutdown(cancel_futures=True)
                console.print(str(failure.__cause__), markup=False, highlight=False)  # what the other process saw
                return 1
            tally.add(done.result())
            if console.is_terminal:
                console.print(f"{tally.drawn.total():,} of {examples:,}", end="\r", highlight=False)
    never = [f"{trait}: {value}" for trait, values in TRAITS.items() for value in values if not tally.covered["valid", trait, value]]
    console.print(_summary(tally, time.monotonic() - begin), _reasons(tally), _coverage(tally), sep="\n")
    console.print(*(f"never drawn: {what}" for what in never), sep="\n")
    return 1 if never and examples >= FULL else 0


def _summary(tally: Tally, seconds: float) -> str:
    drawn, accepted = tally.drawn, tally.accepted
    return (
        f"{drawn.total():,} workers in {seconds:.0f} s, each refused or right to the byte: "
        f"{accepted['valid']:,} of {drawn['valid']:,} that an engine allocates were served; "
        f"of {drawn['other']:,} others {accepted['other']:,} were, and {drawn['other'] - accepted['other']:,} were refused."
    )


def _reasons(tally: Tally) -> Table:
    table = Table("refused for", "workers", title="Refusals, of the others")
    for reason, times in tally.refused.most_common():
        table.add_row(reason, f"{times:,}")
    return table


def _coverage(tally: Tally) -> Table:
    table = Table("trait", "value: workers that must be served / others", title="Coverage")
    for trait, expected in TRAITS.items():
        others = {value for _, name, value in tally.covered if name == trait} - set(expected)
        counts = [
            (value, tally.covered["valid", trait, value], tally.covered["other", trait, value]) for value in (*expected, *sorted(others))
        ]
        table.add_row(trait, ", ".join(f"{value}: {valid:,} / {other:,}" for value, valid, other in counts))
    return table


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else FULL))
