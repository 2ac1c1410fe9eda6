"""The values of kvreg's metrics, kept by kvreg itself.

Not prometheus-client's own Counter and Gauge: with PROMETHEUS_MULTIPROC_DIR in the environment those keep every value,
of private registries too, in files that the engine's /metrics adds up, so each count would be seen twice and a missing
directory would be an error; and they cannot go on from values that a dead process left.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
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


@dataclass(slots=True, eq=False)
class Series(Collector):
    """A sink that a prometheus-client registry can collect; safe to use from several threads."""

    _values: dict[tuple[str, LabelValues], float] = field(default_factory=dict)
    _observed: dict[tuple[str, LabelValues], _Observed] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def declare(self, metric: Metric, labels: LabelValues) -> None:
        """The series exists, at zero unless it has a value."""
        with self._lock:
            if metric.type == "histogram":
                self._observed.setdefault((metric.name, labels), _none_observed(metric))
            else:
                self._values.setdefault((metric.name, labels), 0.0)

    def add(self, metric: Metric, labels: LabelValues, amount: float) -> None:
        """Count."""
        with self._lock:
            self._values[metric.name, labels] = self._values.get((metric.name, labels), 0.0) + amount

    def put(self, metric: Metric, labels: LabelValues, value: float) -> None:
        """Set."""
        with self._lock:
            self._values[metric.name, labels] = value

    def observe(self, metric: Metric, labels: LabelValues, value: float) -> None:
        """Put one observation in its bucket."""
        with self._lock:
            observed = self._observed.setdefault((metric.name, labels), _none_observed(metric))
            observed.counts[bisect_left(metric.buckets, value)] += 1
            observed.sum += value

    def workers(self) -> frozenset[Worker]:
        """Whose series these are."""
        with self._lock:
            return frozenset(Worker(*labels[: len(WORKER_LABELS)]) for _, labels in (*self._values, *self._observed))

    def keep_only(self, worker: Worker) -> int:
        """Forget every other worker's series; returns how many."""
        mine = worker.label_values
        with self._lock:
            before = len(self._values) + len(self._observed)
            self._values = {key: value for key, value in self._values.items() if key[1][: len(mine)] == mine}
            self._observed = {key: seen for key, seen in self._observed.items() if key[1][: len(mine)] == mine}
            return before - len(self._values) - len(self._observed)

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
        with self._lock:
            values, observed = dict(self._values), {key: _Observed(list(seen.counts), seen.sum) for key, seen in self._observed.items()}
        for metric in METRICS:
            yield _family(metric, values, observed)

    def describe(self) -> Iterator[Family]:
        """Every metric, without series."""
        return (_family(metric, {}, {}) for metric in METRICS)

    def text(self) -> str:
        """Every series in Prometheus' text format, letter by letter as prometheus-client writes it.

        A ledger is written twice in every registration, and prometheus-client spends more on these hundreds of lines
        than all stages do: it checks and escapes each label name of each line anew.
        """
        series: dict[str, list[tuple[LabelValues, float]]] = {metric.name: [] for metric in METRICS}
        with self._lock:
            for (name, labels), value in self._values.items():
                series[name].append((labels, value))
            for (name, labels), seen in self._observed.items():
                series[name] += _histogram(BOUNDS[name], labels, seen)
        lines = []
        for metric in METRICS:
            lines.append(f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.type}\n")
            lines += [f"{_sample(metric, labels)}{_number(value)}\n" for labels, value in series[metric.name]]
        return "".join(lines)

    def _take(self, read: _Read, now: float) -> None:
        key, metric = (read.metric.name, read.labels), read.metric
        if metric.type == "histogram":
            observed = self._observed.setdefault(key, _none_observed(metric))
            if read.part == "sum":
                observed.sum += read.value
            else:
                # Under another release's bounds an observation moves to the bucket that surely holds it.
                observed.counts[bisect_left(metric.buckets, read.bound)] += read.value
        elif metric.type == "counter":
            self._values[key] = self._values.get(key, 0.0) + read.value
        else:
            self._values[key] = max(self._values.get(key, 0.0), min(read.value, now))


BOUNDS = {metric.name: (*map(floatToGoString, metric.buckets), "+Inf") for metric in METRICS if metric.type == "histogram"}
"""A histogram's upper bounds as its series name them."""


def _histogram(bounds: Iterable[str], labels: LabelValues, seen: _Observed) -> Iterator[tuple[LabelValues, float]]:
    """A histogram's series: its labels and the part that each is, a bucket by its bound."""
    counts = list(accumulate(seen.counts))
    yield from (((*labels, "_bucket", bound), count) for bound, count in zip(bounds, counts, strict=True))
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


def _family(metric: Metric, values: dict[tuple[str, LabelValues], float], observed: dict[tuple[str, LabelValues], _Observed]) -> Family:
    if metric.type == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.label_names)
        bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
        for (name, labels), seen in observed.items():
            if name == metric.name:
                histogram.add_metric(labels, list(zip(bounds, accumulate(seen.counts), strict=True)), seen.sum)
        return histogram
    family = (CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily)(metric.name, metric.help, labels=metric.label_names)
    for (name, labels), value in values.items():
        if name == metric.name:
            family.add_metric(labels, value)
    return family
