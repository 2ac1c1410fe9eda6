"""What a run adds to the metrics, wherever they are kept: a registry, a ledger, counts on their way to the engine."""

import time
from collections.abc import Callable, Collection
from typing import Protocol

from metrics.catalogue import (
    BUILD_INFO,
    BYPASSED,
    NO_RULE,
    OTHER_RULE,
    RECOVERIES,
    REGISTERED_BYTES,
    REGISTERED_GROUPS,
    REGISTERED_LAYERS,
    RULE_APPLICATIONS,
    RULE_LAST_REJECTION,
    RULE_NAMES,
    RULE_REJECTIONS,
    RUN_LAST_FINISHED,
    RUN_LAST_STARTED,
    RUNS,
    STAGE_DURATION,
    LabelValues,
    Metric,
    Worker,
    worker_of,
)
from metrics.observer import Outcome, Run, StageResult
from stages.errors import RegistrationRejected, Rejection, Stage, TransferError
from stages.model import Edited, Receipt

Clock = Callable[[], float]


class Sink(Protocol):
    """Where values go. `labels` are a metric's `label_names`, by value."""

    def declare(self, worker: LabelValues) -> None:
        """Every series of a worker exists, though nothing happened to it yet."""

    def add(self, metric: Metric, labels: LabelValues, amount: float) -> None:
        """A counter grew."""

    def put(self, metric: Metric, labels: LabelValues, value: float) -> None:
        """A gauge is now this."""

    def observe(self, metric: Metric, labels: LabelValues, value: float) -> None:
        """A histogram saw this."""


def rejections_of(cause: BaseException | None) -> tuple[Rejection, ...]:
    """The refusals an ended run carries: all that a stage refused, or the one cause of a failed transfer."""
    if isinstance(cause, RegistrationRejected):
        return cause.rejections
    return (cause.rejection,) if isinstance(cause, TransferError) else ()


def declare(sink: Sink, worker: Worker) -> None:
    """Every series this worker will ever have, at zero, so that the first event is an increase."""
    whose = worker.label_values
    sink.declare(whose)
    sink.put(BUILD_INFO, whose + BUILD_INFO.series[0], 1)


class Tally:
    """An observer that counts every run it is told of into a sink. `clock` tells Unix time in seconds."""

    def __init__(self, sink: Sink, rules: Collection[str] = RULE_NAMES, clock: Clock = time.time) -> None:
        self._sink = sink
        self._rules = frozenset(rules)
        self._clock = clock

    def started(self, run: Run) -> None:
        """Declare the worker's series; nothing is registered until this run says so."""
        worker = worker_of(run)
        declare(self._sink, worker)
        self._sink.put(RUN_LAST_STARTED, worker.label_values, self._clock())
        self._sink.put(BYPASSED, worker.label_values, 0)
        self._registered(worker, groups=0, layers=0, size_bytes=0)

    def stage_finished(self, run: Run, stage: Stage, duration_s: float, result: StageResult) -> None:
        """Count a stage's time and what its result says."""
        worker = worker_of(run)
        self._sink.observe(STAGE_DURATION, (*worker.label_values, stage.value), duration_s)
        if isinstance(result, Edited):
            for (_, rule), names in result.applied.items():
                self._sink.add(RULE_APPLICATIONS, (*worker.label_values, stage.value, self._rule(stage, rule)), len(names))
        if isinstance(result, Receipt):
            plan = result.plan
            self._registered(worker, len(plan.groups), len(plan.layers), plan.registered_bytes)

    def finished(self, run: Run, outcome: Outcome, cause: BaseException | None) -> None:
        """Count how the run ended, and each refusal once, however many layers it names."""
        worker, now = worker_of(run), self._clock()
        for rejection in rejections_of(cause):
            who = (*worker.label_values, rejection.stage.value, self._rule(rejection.stage, rejection.rule))
            self._sink.add(RULE_REJECTIONS, (*who, rejection.reason.value), 1)
            self._sink.put(RULE_LAST_REJECTION, who, now)
        self._sink.add(RUNS, (*worker.label_values, outcome.value), 1)
        self._sink.put(RUN_LAST_FINISHED, (*worker.label_values, outcome.value), now)

    def recovered(self, run: Run, outcome: Outcome) -> None:
        """Count a plan that was sent again after the backend lost it."""
        self._sink.add(RECOVERIES, (*worker_of(run).label_values, outcome.value), 1)

    def bypassed(self, run: Run, cause: BaseException) -> None:
        """Say that the engine serves on without this worker's registration."""
        self._sink.put(BYPASSED, worker_of(run).label_values, 1)

    def _registered(self, worker: Worker, groups: int, layers: int, size_bytes: int) -> None:
        for metric, value in ((REGISTERED_GROUPS, groups), (REGISTERED_LAYERS, layers), (REGISTERED_BYTES, size_bytes)):
            self._sink.put(metric, worker.label_values, value)

    def _rule(self, stage: Stage, rule: str | None) -> str:
        """The rule as a label: only the edit stage has rules, and only known ones are named."""
        if rule is None or stage is not Stage.EDIT:
            return NO_RULE
        return rule if rule in self._rules else OTHER_RULE
