"""What every benchmark is made of: two things measured in turn, the spread of their ratio, and a table of it."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """One benchmark's part of `docs/benchmarks.md`: what was asked, the bar, what was measured."""

    title: str
    text: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    verdict: str

    def markdown(self) -> str:
        """The section as it stands in the document and in the terminal."""
        lines = [self.headers, ["---"] * len(self.headers), *self.rows]
        table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
        return f"## {self.title}\n\n{self.text}\n\n{table}\n\n{self.verdict}\n"


@dataclass(frozen=True)
class Spread:
    """The least, the middle and the greatest of some measurements."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """The spread of at least one value."""
        ordered = sorted(values)
        return cls(ordered[0], statistics.median(ordered), ordered[-1])

    def __format__(self, form: str) -> str:
        return f"{self.middle:{form}} ({self.low:{form}} to {self.high:{form}})"


@dataclass(frozen=True)
class Compared:
    """Two things measured in turn: the middle time of each, in seconds, and the spread of first over second, round by round."""

    first_s: float
    second_s: float
    ratio: Spread


def compare(first: Callable[[], object], second: Callable[[], object], rounds: int) -> Compared:
    """Measure both in turn, so that both meet the same noise; one unmeasured round before."""
    first(), second()
    pairs = [(seconds(first), seconds(second)) for _ in range(rounds)]
    ours, theirs = zip(*pairs, strict=True)
    return Compared(statistics.median(ours), statistics.median(theirs), Spread.of(one / other for one, other in pairs))


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def bar(what: str, holds: bool) -> str:
    """The verdict on a bar."""
    return f"**Bar: {what}: {'holds' if holds else 'does not hold in this run'}.**"
