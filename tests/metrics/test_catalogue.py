"""The metrics' names, types and labels are a contract with dashboards and alerts, and their number is bounded."""

from prometheus_client.parser import text_string_to_metric_families

from metrics.catalogue import METRICS, RULE_NAMES, WORKER_LABELS
from metrics.observer import Outcome
from metrics.prometheus import PrometheusObserver
from stages.errors import REASONS, Reason, Stage
from stages.rules import RULES
from tests.metrics.watched import run
from tests.offers import hybrid

TABLE = {
    "kvreg_rule_applications_total": ("counter", {"stage", "rule"}),
    "kvreg_rule_rejections_total": ("counter", {"stage", "rule", "reason"}),
    "kvreg_rule_last_rejection_timestamp_seconds": ("gauge", {"stage", "rule"}),
    "kvreg_runs_total": ("counter", {"outcome"}),
    "kvreg_run_last_started_timestamp_seconds": ("gauge", set()),
    "kvreg_run_last_finished_timestamp_seconds": ("gauge", {"outcome"}),
    "kvreg_stage_duration_seconds": ("histogram", {"stage"}),
    "kvreg_registered_groups": ("gauge", set()),
    "kvreg_registered_layers": ("gauge", set()),
    "kvreg_registered_bytes": ("gauge", set()),
    "kvreg_recoveries_total": ("counter", {"outcome"}),
    "kvreg_bypassed": ("gauge", set()),
    "kvreg_build_info": ("gauge", {"version", "vllm_version", "lmcache_version"}),
}


def test_names_types_and_labels_are_the_contract() -> None:
    """A dashboard or an alert written for one release works with the next: nothing is renamed, dropped or added unseen."""
    assert {metric.name: (metric.type, set(metric.labels)) for metric in METRICS} == TABLE
    assert WORKER_LABELS == ("model_name", "role", "worker_id")


def test_what_is_exposed_is_what_the_catalogue_says() -> None:
    """Another reader than the writer finds the same names, types, labels and help, and nothing else."""
    metrics = PrometheusObserver()
    run(hybrid(), [metrics])
    families = {
        family.name + ("_total" if family.type == "counter" else ""): family for family in text_string_to_metric_families(metrics.text())
    }
    assert set(families) == set(TABLE)
    for metric in METRICS:
        family = families[metric.name]
        assert (family.type, family.documentation) == (metric.type, metric.help)
        assert {frozenset(sample.labels) - {"le"} for sample in family.samples} == {frozenset(metric.label_names)}


def test_every_series_is_there_from_the_start() -> None:
    """A first refusal is an increase from zero, not a series that appears at one."""
    metrics = PrometheusObserver()
    run(hybrid(), [metrics])
    exposed = {
        (sample.name, tuple(sample.labels[label] for label in metric.labels))
        for metric, family in zip(METRICS, metrics.registry.collect(), strict=True)
        for sample in family.samples
        if sample.name == metric.name
    }
    declared = {(metric.name, labels) for metric in METRICS if metric.type != "histogram" for labels in metric.series}
    assert exposed == declared


def test_the_number_of_series_of_a_worker_is_bounded() -> None:
    """However many refusals, layers, shapes and models' rules it meets, a worker has at most this many series."""
    rules = len(RULES) + 3  # the edit that tells look-alikes apart, "other", and none
    who = len(Stage) + rules - 1  # only the edit stage has rules
    buckets = 18 + 2
    refusals = sum(len(REASONS[stage]) * (rules if stage is Stage.EDIT else 1) for stage in Stage)
    bound = refusals + who + (rules - 1) + len(Stage) * buckets + 3 * len(Outcome) + 1 + 3 + 1 + 1
    metrics = PrometheusObserver()
    for mode in ("align", "none", "x", "y"):
        for layout in ("NHD", "HND", "BHLNC", "made up"):
            run(hybrid(num_blocks=len(mode) + 2, mode=mode, layout=layout), [metrics])
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    assert len(samples) == len({(sample.name, tuple(sample.labels.items())) for sample in samples}) == bound
    assert bound < 400, "a scrape of a node with eight workers stays small"


def test_label_values_come_from_closed_sets() -> None:
    """No layer, shape, dtype, reason text, run id or process id can become a label."""
    closed: dict[str, set[str]] = {
        "stage": set(Stage),
        "rule": {*RULE_NAMES, "none", "other"},
        "reason": set(Reason),
        "outcome": set(Outcome),
    }
    for metric in METRICS:
        for label, values in zip(metric.labels, zip(*metric.series, strict=True), strict=True):
            assert label.endswith("version") or set(values) <= closed[label]


def test_buckets_reach_from_a_pure_stage_to_the_time_limit() -> None:
    """A stage of a millisecond and a transfer that waits five minutes each have a bucket."""
    (duration,) = (metric for metric in METRICS if metric.type == "histogram")
    assert (duration.buckets[0], duration.buckets[-1]) == (0.001, 300.0)
    assert list(duration.buckets) == sorted(set(duration.buckets))
