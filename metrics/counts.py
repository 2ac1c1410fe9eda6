"""What was counted since it was last asked for, as plain values that travel to another process and add up there.

A payload is `{metric name: [[label values, value], …]}`: what a counter grew by, what a gauge is, and for a histogram
the list of what it observed. Strings, numbers and lists only, so that pickle, JSON and MessagePack all carry it.
"""

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeAlias

from metrics.catalogue import METRICS, RULE_NAMES, LabelValues, Metric
from metrics.tally import Clock, Tally

Value: TypeAlias = float | list[float]
Payload: TypeAlias = dict[str, list[tuple[list[str], Value]]]

BY_NAME = {metric.name: metric for metric in METRICS}


@dataclass(slots=True)
class Counts:
    """A sink that only keeps what changed; series at zero are not worth sending."""

    _values: dict[tuple[str, LabelValues], Value] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def declare(self, worker: LabelValues) -> None:
        """Nothing: a series that nothing happened to is not sent."""

    def add(self, metric: Metric, labels: LabelValues, amount: float) -> None:
        """Count."""
        with self._lock:
            held = self._values.get((metric.name, labels), 0.0)
            self._values[metric.name, labels] = amount + (0.0 if isinstance(held, list) else held)

    def put(self, metric: Metric, labels: LabelValues, value: float) -> None:
        """Set."""
        with self._lock:
            self._values[metric.name, labels] = value

    def observe(self, metric: Metric, labels: LabelValues, value: float) -> None:
        """Keep one observation."""
        with self._lock:
            held = self._values.get((metric.name, labels))
            self._values[metric.name, labels] = [*held, value] if isinstance(held, list) else [value]

    def drain(self) -> Payload:
        """What changed since the last drain; empty if nothing did."""
        with self._lock:
            values, self._values = self._values, {}
        payload: Payload = {}
        for (name, labels), value in values.items():
            payload.setdefault(name, []).append((list(labels), value))
        return payload


class CountsObserver(Tally):
    """Counts every run it is told of, until it is drained. `rules` and `clock` as in `PrometheusObserver`."""

    def __init__(self, rules: Collection[str] = RULE_NAMES, clock: Clock = time.time) -> None:
        self._counts = Counts()
        super().__init__(self._counts, rules, clock)

    def drain(self) -> Payload:
        """What was counted since the last drain; empty if nothing was."""
        return self._counts.drain()


def entries(payload: Payload) -> Iterator[tuple[Metric, LabelValues, Value]]:
    """A payload's values with their metrics; names that this release does not know are left out."""
    for name, values in payload.items():
        if name in BY_NAME:
            for labels, value in values:
                yield BY_NAME[name], tuple(labels), value


def merged(first: Payload, second: Payload) -> Payload:
    """Both payloads as one: counters and observations add up, of gauges the second's is kept."""
    counts = Counts()
    for metric, labels, value in (*entries(first), *entries(second)):
        if isinstance(value, list):
            for observation in value:
                counts.observe(metric, labels, observation)
        elif metric.type == "counter":
            counts.add(metric, labels, value)
        else:
            counts.put(metric, labels, value)
    return counts.drain()
