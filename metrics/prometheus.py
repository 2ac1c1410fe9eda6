"""A registry that counts registrations, for whoever can scrape or print it."""

import time
from collections.abc import Collection

from prometheus_client import CollectorRegistry, generate_latest

from metrics.catalogue import RULE_NAMES
from metrics.series import Series
from metrics.tally import Clock, Tally


class PrometheusObserver(Tally):
    """Counts every run it is told of, of one worker or of many, in a registry of its own.

    The registry is private unless one is given: the default one of prometheus-client is the engine's. `rules` are the
    names that become labels; a rule of another name is counted as "other". `clock` tells Unix time in seconds.
    """

    def __init__(self, registry: CollectorRegistry | None = None, rules: Collection[str] = RULE_NAMES, clock: Clock = time.time) -> None:
        series = Series()
        super().__init__(series, rules, clock)
        self.registry = CollectorRegistry() if registry is None else registry
        self.registry.register(series)

    def text(self) -> str:
        """Every series of the registry in Prometheus' text format."""
        return generate_latest(self.registry).decode()
