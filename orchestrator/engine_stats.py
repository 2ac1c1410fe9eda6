"""A living engine's counts on its own /metrics: from a worker, through vLLM's connector statistics, to its API server.

The names, help texts and labels are those of the ledger (metrics/catalogue.py); vLLM adds its `engine` label, and its
own `model_name` stands for ours. They show what was counted since the engine started, from its first step on.

Whoever adds up must not add both. A series of the ledger never has the label `engine`, a series of vLLM always has it:

    kvreg_rule_rejections_total{engine=""}     the ledgers: whole, resumed over restarts; what alert rules read
    kvreg_rule_rejections_total{engine!=""}    what this engine's life has counted

(The scrape job tells them apart as well: ledgers come from node_exporter.) Where a ledger may be missing, take
`max without (engine, job, instance) (…)`, never `sum`: the ledger's count of a worker is never below its engine's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from metrics.catalogue import METRICS, RUNS, Metric
from metrics.counts import CountsObserver, Payload, entries, merged


@dataclass
class RegistrationStats(KVConnectorStats):
    """What registrations counted since the last step, on its way from a worker to the engine's metrics.

    `data` is a payload of metrics/counts.py: plain values, added up by vLLM over workers and steps.
    """

    data: Payload = field(default_factory=dict)

    def reset(self) -> None:
        """Forget what was counted."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "RegistrationStats":
        """Take in another worker's or a later step's counts."""
        self.data = merged(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the engine's periodic log line: how many registrations ended, by how."""
        ended: dict[str, int | float] = {}
        for metric, labels, value in entries(self.data):
            if metric is RUNS and not isinstance(value, list):
                name = f"Registrations {labels[-1]}"
                ended[name] = ended.get(name, 0) + int(value)
        return ended

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class RegistrationPromMetrics(KVConnectorPromMetrics):
    """The catalogue's metrics in the engine's API server, with the engine's labels before the worker's."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            metric.name: _metric(metric, (self._counter_cls, self._gauge_cls, self._histogram_cls), tuple(labelnames)) for metric in METRICS
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count what the workers of one engine sent."""
        engine = dict(zip(self._labelnames, map(str, self.per_engine_labelvalues[engine_idx]), strict=True))
        for metric, labels, value in entries(transfer_stats_data):
            series = self._metrics[metric.name].labels(**{**dict(zip(metric.label_names, labels, strict=True)), **engine})
            if isinstance(value, list):
                for observation in value:
                    series.observe(observation)
            elif metric.type == "counter":
                series.inc(value)
            else:
                series.set(value)


def drained(counts: CountsObserver) -> RegistrationStats | None:
    """What a connector's `get_kv_connector_stats` returns: the counts since its last call, None if there are none."""
    payload = counts.drain()
    return RegistrationStats(payload) if payload else None


@cache
def _metric(metric: Metric, types: tuple[type[Any], type[Any], type[Any]], engine_labels: tuple[str, ...]) -> Any:
    """One metric, made once in a process: vLLM takes only its own names back when it sets its metrics up again."""
    counter, gauge, histogram = types
    labels = [*engine_labels, *(name for name in metric.label_names if name not in engine_labels)]
    if metric.type == "counter":
        return counter(name=metric.name, documentation=metric.help, labelnames=labels)
    if metric.type == "histogram":
        return histogram(name=metric.name, documentation=metric.help, labelnames=labels, buckets=list(metric.buckets))
    # Where several API servers add up their files, each gauge is one worker's, sent to one server: the newest is right.
    return gauge(name=metric.name, documentation=metric.help, labelnames=labels, multiprocess_mode="mostrecent")
