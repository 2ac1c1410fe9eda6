"""The values of kvreg's metrics, kept by kvreg itself.

Not prometheus-client's own Counter and Gauge: with PROMETHEUS_MULTIPROC_DIR in the environment those keep every value,
of private registries too, in files that the engine's /metrics adds up, so each count would be seen twice and a missing
directory would be an error; and they cannot go on from values that a dead process left.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from threading import Lock

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from metrics.catalogue import METRICS, WORKER_LABELS, LabelValues, Metric, Worker


@dataclass(slots=True)
class _Observed:
    """A histogram's observations: how many fell in each bucket (the last is +Inf), and their sum."""

    counts: list[float]
    sum: float = 0.0


@dataclass(frozen=True, slots=True)
class _Read:
    """A value read back: of a histogram, which `part`, and of its buckets which upper `bound`."""

    metric: Metric
    part: str
    labels: LabelValues
    bound: float
    value: float


_PLACES = {metric.name: (metric, "") for metric in METRICS if metric.type != "histogram"} | {
    f"{metric.name}_{part}": (metric, part) for metric in METRICS if metric.type == "histogram" for part in ("bucket", "sum")
}
"""Which metric a sample of the text format belongs to, and as what."""

_CLOSED = {metric.name: frozenset(metric.series) for metric in METRICS}


@dataclass(slots=True)
class _Kept:
    """One metric's series: what each is or saw, and their text until one of them changes."""

    values: dict[LabelValues, float] = field(default_factory=dict)
    observed: dict[LabelValues, _Observed] = field(default_factory=dict)
    text: str | None = None

    def number(self) -> int:
        """How many series there are."""
        return len(self.values) + len(self.observed)


@dataclass(slots=True, eq=False)
class Series(Collector):
    """A sink that a prometheus-client registry can collect; safe to use from several threads."""

    _kept: dict[str, _Kept] = field(default_factory=lambda: {metric.name: _Kept() for metric in METRICS})
    _lock: Lock = field(default_factory=Lock)

    def declare(self, worker: LabelValues) -> None:
        """Every series of a worker exists, at zero unless it has a value."""
        with self._lock:
            for metric in METRICS:
                kept, before = self._kept[metric.name], self._kept[metric.name].number()
                for labels in series_of(metric, worker):
                    if metric.type == "histogram":
                        kept.observed.setdefault(labels, _none_observed(metric))
                    else:
                        kept.values.setdefault(labels, 0.0)
                if kept.number() != before:
                    kept.text = None

    def add(self, metric: Metric, labels: LabelValues, amount: float) -> None:
        """Count."""
        with self._lock:
            kept = self._kept[metric.name]
            kept.values[labels] = kept.values.get(labels, 0.0) + amount
            kept.text = None

    def put(self, metric: Metric, labels: LabelValues, value: float) -> None:
        """Set."""
        with self._lock:
            kept = self._kept[metric.name]
            if kept.values.get(labels) != value:
                kept.values[labels] = value
                kept.text = None

    def observe(self, metric: Metric, labels: LabelValues, value: float) -> None:
        """Put one observation in its bucket."""
        with self._lock:
            kept = self._kept[metric.name]
            observed = kept.observed.setdefault(labels, _none_observed(metric))
            observed.counts[bisect_left(metric.buckets, value)] += 1
            observed.sum += value
            kept.text = None

    def workers(self) -> frozenset[Worker]:
        """Whose series these are."""
        with self._lock:
            every = [labels for kept in self._kept.values() for labels in (*kept.values, *kept.observed)]
        return frozenset(Worker(*labels[: len(WORKER_LABELS)]) for labels in every)

    def keep_only(self, worker: Worker) -> int:
        """Forget every other worker's series; returns how many."""
        mine, dropped = worker.label_values, 0
        with self._lock:
            for kept in self._kept.values():
                before = kept.number()
                kept.values = {labels: value for labels, value in kept.values.items() if labels[: len(mine)] == mine}
                kept.observed = {labels: seen for labels, seen in kept.observed.items() if labels[: len(mine)] == mine}
                if kept.number() != before:
                    kept.text = None
                    dropped += before - kept.number()
        return dropped

    def resume(self, text: str, now: float) -> int:
        """Go on from values in the text format; returns how many series were taken over.

        Counters and histograms are added, timestamps kept if later, but never later than `now`, so that a clock that ran
        ahead does not page for ever. What is no series of the catalogue is left out. Raises ValueError for other text.
        """
        read = list(_placed(text))
        with self._lock:
            for value in read:
                self._take(value, now)
        return len({(value.metric.name, value.labels) for value in read})

    def collect(self) -> Iterator[Family]:
        """Every metric with its series, for a registry."""
        for metric in METRICS:
            with self._lock:
                kept = self._kept[metric.name]
                values = dict(kept.values)
                observed = {labels: _Observed(list(seen.counts), seen.sum) for labels, seen in kept.observed.items()}
            yield _family(metric, values, observed)

    def describe(self) -> Iterator[Family]:
        """Every metric, without series."""
        return (_family(metric, {}, {}) for metric in METRICS)

    def text(self) -> str:
        """Every series in Prometheus' text format, letter by letter as prometheus-client writes it.

        A ledger is written twice in every registration, and prometheus-client spends more on these hundreds of lines
        than all stages do: it checks and escapes each label name of each line anew. A metric that has not changed since
        is not written anew.
        """
        with self._lock:
            return "".join(_text(metric, self._kept[metric.name]) for metric in METRICS)

    def _take(self, read: _Read, now: float) -> None:
        metric, labels, kept = read.metric, read.labels, self._kept[read.metric.name]
        kept.text = None
        if metric.type == "histogram":
            observed = kept.observed.setdefault(labels, _none_observed(metric))
            if read.part == "sum":
                observed.sum += read.value
            else:
                # Under another release's bounds an observation moves to the bucket that surely holds it.
                observed.counts[bisect_left(metric.buckets, read.bound)] += read.value
        elif metric.type == "counter":
            kept.values[labels] = kept.values.get(labels, 0.0) + read.value
        else:
            kept.values[labels] = max(kept.values.get(labels, 0.0), min(read.value, now))


@lru_cache(maxsize=256)
def series_of(metric: Metric, worker: LabelValues) -> tuple[LabelValues, ...]:
    """The labels of every series that a worker has of a metric."""
    return tuple(worker + labels for labels in metric.series)


def _text(metric: Metric, kept: _Kept) -> str:
    """A metric's head and series."""
    if kept.text is None:
        series = [*kept.values.items(), *(line for labels, seen in kept.observed.items() for line in _histogram(metric, labels, seen))]
        lines = [f"{_sample(metric, labels)}{_number(value)}\n" for labels, value in series]
        kept.text = f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.type}\n" + "".join(lines)
    return kept.text


BOUNDS = {metric.name: (*map(floatToGoString, metric.buckets), "+Inf") for metric in METRICS if metric.type == "histogram"}
"""A histogram's upper bounds as its series name them."""


def _histogram(metric: Metric, labels: LabelValues, seen: _Observed) -> Iterator[tuple[LabelValues, float]]:
    """A histogram's series: its labels and the part that each is, a bucket by its bound."""
    counts = list(accumulate(seen.counts))
    yield from (((*labels, "_bucket", bound), count) for bound, count in zip(BOUNDS[metric.name], counts, strict=True))
    yield (*labels, "_count"), counts[-1]
    yield (*labels, "_sum"), seen.sum


@lru_cache(maxsize=4096)
def _sample(metric: Metric, labels: LabelValues) -> str:
    """A line up to its value; of a histogram the part, and a bucket's bound, stand after the label values."""
    count = len(metric.label_names)
    part, *bound = labels[count:] or ("",)
    names = (*metric.label_names, "le") if bound else metric.label_names
    told = sorted(zip(names, (*labels[:count], *bound), strict=True))
    return f"{metric.name}{part}{{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in told) + "} "


def _number(value: float) -> str:
    return f"{value:.1f}" if value == 0 else str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _none_observed(metric: Metric) -> _Observed:
    return _Observed([0.0] * (len(metric.buckets) + 1))


_LINE = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:[a-zA-Z_]\w*="(?:[^"\\]|\\.)*",?)*)\})? (\S+)', re.ASCII)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of each sample. Read here and not by prometheus-client's parser, which takes a worker's start
    a quarter of a second for a ledger of this many series. Raises ValueError."""
    for line in text.split("\n"):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError("not Prometheus' text format")
        name, labels, value = match.groups()
        yield name, {label: _ESCAPED.sub(_unescaped, quoted) for label, quoted in _LABEL.findall(labels or "")}, float(value)


def worker_of_text(text: str) -> Worker | None:
    """Whose series a text begins with; None if that is not told."""
    first = next((line for line in text.split("\n")[:-1] if line and not line.startswith("#")), "")
    try:
        labels = next((labels for _, labels, _ in _samples(first)), {})
    except ValueError:
        return None
    values = [labels[label] for label in WORKER_LABELS if label in labels]
    return Worker(*values) if len(values) == len(WORKER_LABELS) else None


def _unescaped(escaped: re.Match[str]) -> str:
    return "\n" if escaped[1] == "n" else escaped[1]


def _placed(text: str) -> Iterator[_Read]:
    """The samples that one of the catalogue's resuming series could have written, a histogram's buckets no longer cumulative."""
    below: dict[tuple[str, LabelValues], float] = {}
    for name, labels, value in _samples(text):
        metric, part = _PLACES.get(name, (None, ""))
        if metric is None or not metric.resumes or not math.isfinite(value) or value < 0:
            continue
        bound = float(labels.pop("le", "nan")) if part == "bucket" else 0.0
        values = tuple(labels.get(label, "") for label in metric.label_names)
        if len(labels) != len(values) or values[len(WORKER_LABELS) :] not in _CLOSED[metric.name] or math.isnan(bound):
            continue
        if part == "bucket":
            value, below[name, values] = value - below.get((name, values), 0.0), value
        if value >= 0:
            yield _Read(metric, part, values, bound, value)


def _family(metric: Metric, values: dict[LabelValues, float], observed: dict[LabelValues, _Observed]) -> Family:
    if metric.type == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.label_names)
        for labels, seen in observed.items():
            histogram.add_metric(labels, list(zip(BOUNDS[metric.name], accumulate(seen.counts), strict=True)), seen.sum)
        return histogram
    family = (CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily)(metric.name, metric.help, labels=metric.label_names)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
