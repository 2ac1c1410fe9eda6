"""What a connector reports to vLLM each step: LMCache's own statistics and kvreg's counts, each under its name.

vLLM takes one kind of statistics from a connector; this one is both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lmcache.integration.vllm.lmcache_mp_metrics import LMCacheMPConnectorStats, LMCacheMPPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from orchestrator.engine_stats import RegistrationPromMetrics, RegistrationStats

LMCACHE, KVREG = "lmcache", "kvreg"


@dataclass
class ConnectorStats(KVConnectorStats):
    """`data` is `{"lmcache": …, "kvreg": …}`, each as its own kind of statistics has it; a part that has nothing is absent."""

    data: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, lmcache: KVConnectorStats | None, kvreg: KVConnectorStats | None) -> "ConnectorStats | None":
        """Both parts as one; None if neither has anything."""
        parts = {LMCACHE: lmcache, KVREG: kvreg}
        data = {name: stats.data for name, stats in parts.items() if stats is not None and not stats.is_empty()}
        return cls(data) if data else None

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "ConnectorStats":
        """Take in another worker's or a later step's, part by part."""
        theirs = _parts(other.data)
        for name, mine in _parts(self.data).items():
            both = mine.aggregate(theirs[name])
            if not both.is_empty():
                self.data[name] = both.data
        return self

    def reduce(self) -> dict[str, int | float]:
        """Both parts' summary for the engine's log line."""
        return {name: value for part in _parts(self.data).values() for name, value in part.reduce().items()}

    def is_empty(self) -> bool:
        """Whether neither part has anything."""
        return all(part.is_empty() for part in _parts(self.data).values())


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """LMCache's metrics and kvreg's in the engine's API server."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        arguments = (vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._parts = {LMCACHE: LMCacheMPPromMetrics(*arguments), KVREG: RegistrationPromMetrics(*arguments)}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count what the connectors of one engine sent."""
        for name, part in self._parts.items():
            part.observe(transfer_stats_data.get(name, {}), engine_idx)


def _parts(data: Mapping[str, Any]) -> dict[str, KVConnectorStats]:
    return {LMCACHE: LMCacheMPConnectorStats(data=dict(data.get(LMCACHE, {}))), KVREG: RegistrationStats(dict(data.get(KVREG, {})))}
