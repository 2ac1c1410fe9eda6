"""What the metrics say after real registrations: counted once, by whom, and never at the cost of the outcome."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, CollectorRegistry

from metrics.observer import Outcome, Run, StageResult
from metrics.prometheus import PrometheusObserver
from stages.errors import Reason, RegistrationRejected, Stage, TransferRefused, TransferUnavailable, reject
from stages.model import Layer, Layout, Receipt
from stages.rules.rule import Edit, Rule
from tests.metrics.watched import Accepting, nonzero, run, run_cancelled, run_together
from tests.offers import hybrid


class Raising:
    """An observer that always fails."""

    def started(self, run: Run) -> None:
        raise OSError("disk full")

    def stage_finished(self, run: Run, stage: Stage, duration_s: float, result: StageResult) -> None:
        raise OSError("disk full")

    def finished(self, run: Run, outcome: Outcome, cause: BaseException | None) -> None:
        raise OSError("disk full")

    def recovered(self, run: Run, outcome: Outcome) -> None:
        raise OSError("disk full")

    def bypassed(self, run: Run, cause: BaseException) -> None:
        raise OSError("disk full")


def refusing(name: str) -> Rule:
    """A rule that refuses every layer of attention."""

    def apply(layer: Layer, layout: Layout) -> Edit:
        raise reject(Reason.WIDTH, content_bytes=1)

    return Rule(name, "refuses", lambda layer, layout: not layer.spec.recurrent, apply)


def test_a_registration_is_counted() -> None:
    """Groups, layers and bytes that are registered, and that a run ended well, a known time ago."""
    times = iter([100.0, 103.5])
    metrics = PrometheusObserver(clock=lambda: next(times))
    receipt = run(hybrid(rank=3), [metrics])
    assert isinstance(receipt, Receipt)
    value = metrics.registry.get_sample_value
    worker = {"model_name": "hybrid", "role": "worker", "worker_id": "3"}
    assert value("kvreg_registered_groups", worker) == len(receipt.plan.groups) == 2
    assert value("kvreg_registered_layers", worker) == len(receipt.plan.layers) == 4
    assert value("kvreg_registered_bytes", worker) == receipt.plan.registered_bytes > 0
    assert value("kvreg_run_last_started_timestamp_seconds", worker) == 100.0
    assert nonzero(metrics.registry, "kvreg_run_last_finished_timestamp_seconds", "outcome") == {("registered",): 103.5}
    assert nonzero(metrics.registry, "kvreg_runs_total", "outcome") == {("registered",): 1}


def test_a_rule_is_counted_once_for_each_layer_it_edited() -> None:
    """Two layers of state and two of attention, each re-viewed by its rule."""
    metrics = PrometheusObserver()
    run(hybrid(), [metrics])
    assert nonzero(metrics.registry, "kvreg_rule_applications_total", "stage", "rule") == {
        ("edit", "mamba-unified-view"): 2,
        ("edit", "subpaged-attention-view"): 2,
    }
    assert nonzero(metrics.registry, "kvreg_rule_rejections_total", "reason") == {}


def test_a_refusal_is_counted_once_however_many_layers_it_names() -> None:
    """One group refused for one cause is one refusal, with the stage, the reason, and no rule."""
    metrics = PrometheusObserver(clock=lambda: 1000.0)
    refused = run(hybrid(mode="none"), [metrics])
    assert isinstance(refused, RegistrationRejected)
    assert [len(rejection.layer_names) for rejection in refused.rejections] == [2]
    assert nonzero(metrics.registry, "kvreg_rule_rejections_total", "stage", "rule", "reason") == {
        ("validate", "none", "mamba_cache_mode"): 1
    }
    assert nonzero(metrics.registry, "kvreg_rule_last_rejection_timestamp_seconds", "stage", "rule") == {("validate", "none"): 1000.0}
    assert nonzero(metrics.registry, "kvreg_runs_total", "outcome") == {("rejected",): 1}
    assert nonzero(metrics.registry, "kvreg_registered_layers", "worker_id") == {}


def test_a_rules_refusal_names_the_rule() -> None:
    """The one who fixes it sees which rule, not only which stage."""
    metrics = PrometheusObserver()
    run(hybrid(), [metrics], rules=(refusing("subpaged-attention-view"),))
    rejected = nonzero(metrics.registry, "kvreg_rule_rejections_total", "stage", "rule", "reason")
    assert rejected[("edit", "subpaged-attention-view", "width")] == 1


def test_a_rule_of_another_name_does_not_become_a_label() -> None:
    """A rule made for one registration is counted as other, so that labels stay a closed set; whoever gives its name sees it."""
    closed, named = PrometheusObserver(), PrometheusObserver(rules=("layer-7-fix",))
    run(hybrid(), [closed, named], rules=(refusing("layer-7-fix"),))
    assert nonzero(closed.registry, "kvreg_rule_rejections_total", "rule", "reason")[("other", "width")] == 1
    assert nonzero(named.registry, "kvreg_rule_rejections_total", "rule", "reason")[("layer-7-fix", "width")] == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TransferRefused(Reason.TRANSFER_REFUSED, {"words": "no"}), "transfer_refused"),
        (TransferUnavailable(Reason.TRANSFER_UNREACHABLE, {}), "transfer_unreachable"),
    ],
)
def test_a_failed_transfer_is_a_failed_run_with_its_reason(error: Exception, reason: str) -> None:
    """The backend's no is counted at the stage where it was said."""
    metrics = PrometheusObserver()
    run(hybrid(), [metrics], Accepting(lambda: error))
    assert nonzero(metrics.registry, "kvreg_runs_total", "outcome") == {("failed",): 1}
    assert nonzero(metrics.registry, "kvreg_rule_rejections_total", "stage", "rule", "reason") == {("transfer-register", "none", reason): 1}
    assert nonzero(metrics.registry, "kvreg_registered_groups", "worker_id") == {}


def test_a_bug_is_a_failed_run_without_a_reason() -> None:
    """What nobody foresaw is counted as failed, and blamed on no rule."""
    metrics = PrometheusObserver()
    with pytest.raises(ZeroDivisionError):
        run(hybrid(), [metrics], Accepting(lambda: ZeroDivisionError("bug")))
    assert nonzero(metrics.registry, "kvreg_runs_total", "outcome") == {("failed",): 1}
    assert nonzero(metrics.registry, "kvreg_rule_rejections_total", "reason") == {}


def test_a_cancelled_run_is_neither_refused_nor_failed() -> None:
    """A shutdown during the transfer pages nobody."""
    metrics = PrometheusObserver()
    run_cancelled(hybrid(), [metrics])
    assert nonzero(metrics.registry, "kvreg_runs_total", "outcome") == {("cancelled",): 1}
    assert nonzero(metrics.registry, "kvreg_rule_last_rejection_timestamp_seconds", "stage", "rule") == {}


def test_each_stage_that_finished_has_a_duration() -> None:
    """Four durations of a whole run; of one refused in the first stage, none."""
    metrics = PrometheusObserver()
    run(hybrid(), [metrics])
    run(hybrid(mode="none"), [metrics])
    assert nonzero(metrics.registry, "kvreg_stage_duration_seconds_count", "stage") == {(stage.value,): 1 for stage in Stage}
    assert (
        metrics.registry.get_sample_value(
            "kvreg_stage_duration_seconds_bucket",
            {"model_name": "hybrid", "role": "worker", "worker_id": "0", "stage": "edit", "le": "+Inf"},
        )
        == 1
    )


def test_an_observation_on_a_bound_is_in_that_bucket() -> None:
    """A bucket's bound is its largest value, as everywhere in Prometheus, and sums are kept."""
    metrics = PrometheusObserver()
    metrics.stage_finished(Run("r", "m", "worker", "0"), Stage.EDIT, 0.25, _validated())
    labels = {"model_name": "m", "role": "worker", "worker_id": "0", "stage": "edit"}
    bucket = {
        le: metrics.registry.get_sample_value("kvreg_stage_duration_seconds_bucket", {**labels, "le": le}) for le in ("0.1", "0.25", "0.5")
    }
    assert bucket == {"0.1": 0, "0.25": 1, "0.5": 1}
    assert metrics.registry.get_sample_value("kvreg_stage_duration_seconds_sum", labels) == 0.25


def test_workers_are_counted_apart() -> None:
    """Four at once in one registry, one of them refused: each has its own series."""
    metrics = PrometheusObserver()
    run_together([hybrid(rank=rank, mode="none" if rank == 2 else "align") for rank in range(4)], [metrics])
    assert nonzero(metrics.registry, "kvreg_runs_total", "worker_id", "outcome") == {
        ("0", "registered"): 1,
        ("1", "registered"): 1,
        ("2", "rejected"): 1,
        ("3", "registered"): 1,
    }


def test_a_new_run_says_that_nothing_is_registered_until_it_is() -> None:
    """A worker that registered, and is refused when it tries again, does not go on showing what it had."""
    metrics = PrometheusObserver()
    run(hybrid(), [metrics])
    run(hybrid(mode="none"), [metrics])
    assert nonzero(metrics.registry, "kvreg_registered_bytes", "worker_id") == {}


def test_recoveries_and_bypass_are_counted() -> None:
    """A plan sent again, and an engine that serves on without it, until the next run."""
    metrics, told = PrometheusObserver(), Run("r", "m", "worker", "0")
    metrics.recovered(told, Outcome.FAILED)
    metrics.recovered(told, Outcome.REGISTERED)
    metrics.recovered(told, Outcome.REGISTERED)
    metrics.bypassed(told, RuntimeError())
    assert nonzero(metrics.registry, "kvreg_recoveries_total", "outcome") == {("failed",): 1, ("registered",): 2}
    assert nonzero(metrics.registry, "kvreg_bypassed", "worker_id") == {("0",): 1}
    metrics.started(told)
    assert nonzero(metrics.registry, "kvreg_bypassed", "worker_id") == {}


def test_the_registry_is_private() -> None:
    """Two observers in one process do not meet, and the process' default registry stays the engine's."""
    before = set(REGISTRY._names_to_collectors)
    first, second = PrometheusObserver(), PrometheusObserver()
    run(hybrid(), [first])
    assert nonzero(second.registry, "kvreg_runs_total", "outcome") == {}
    assert set(REGISTRY._names_to_collectors) == before


def test_a_registry_that_is_given_is_used() -> None:
    """Whoever has a registry to scrape gives it, and a second observer in it is an error, not a double count."""
    registry = CollectorRegistry()
    run(hybrid(), [PrometheusObserver(registry)])
    assert nonzero(registry, "kvreg_runs_total", "outcome") == {("registered",): 1}
    with pytest.raises(ValueError, match="Duplicated"):
        PrometheusObserver(registry)


def test_a_model_name_of_any_characters_is_one_label() -> None:
    """Quotes, newlines and what is no UTF-8 break neither the exposition nor the count."""
    metrics = PrometheusObserver()
    for _ in range(2):
        run(replace(hybrid(), model_name='a"b\nkvreg_runs_total 7\\\r\udc80'), [metrics])
    assert nonzero(metrics.registry, "kvreg_runs_total", "outcome") == {("registered",): 2}
    assert "\nkvreg_runs_total 7" not in metrics.text()


@pytest.mark.parametrize("mode", ["align", "none"])
def test_observers_that_fail_change_no_outcome_and_no_count(mode: str) -> None:
    """Before and after one that raises, the others see the run, and its caller gets what it would have got."""
    before, after = PrometheusObserver(), PrometheusObserver()
    outcome = run(hybrid(mode=mode), [before, Raising(), after])
    assert type(outcome) is (Receipt if mode == "align" else RegistrationRejected)
    expected = {("registered" if mode == "align" else "rejected",): 1}
    assert nonzero(before.registry, "kvreg_runs_total", "outcome") == nonzero(after.registry, "kvreg_runs_total", "outcome") == expected


COUNT = """
import os, sys
from prometheus_client import CollectorRegistry, multiprocess
from metrics.observer import Outcome, Run
from metrics.prometheus import PrometheusObserver
metrics = PrometheusObserver()
metrics.started(Run("r", "m", "worker", "0"))
metrics.finished(Run("r", "m", "worker", "0"), Outcome.REGISTERED, None)
assert 'outcome="registered",role="worker",worker_id="0"} 1.0' in metrics.text()
os.mkdir(sys.argv[1])
metrics.finished(Run("r", "m", "worker", "0"), Outcome.REGISTERED, None)
scraped = CollectorRegistry()
multiprocess.MultiProcessCollector(scraped, sys.argv[1])
assert [family.name for family in scraped.collect()] == []
"""


def test_counts_are_the_same_in_prometheus_multiprocess_mode(tmp_path: Path) -> None:
    """With PROMETHEUS_MULTIPROC_DIR the engine adds up files of every process: ours are not among them, and need no directory."""
    directory = tmp_path / "multiproc"
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PROMETHEUS_MULTIPROC_DIR": str(directory)}
    ran = subprocess.run([sys.executable, "-c", COUNT, str(directory)], env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert list(directory.iterdir()) == []


def _validated() -> StageResult:
    kept: list[StageResult] = []

    class Keep(Raising):
        def started(self, run: Run) -> None: ...

        def stage_finished(self, run: Run, stage: Stage, duration_s: float, result: StageResult) -> None:
            kept.append(result)

        def finished(self, run: Run, outcome: Outcome, cause: BaseException | None) -> None: ...

    run(hybrid(), [Keep()])
    return kept[0]
