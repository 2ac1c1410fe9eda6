"""From killed workers to the pager, through real servers with the shipped configuration."""

import shutil
import subprocess
from pathlib import Path

import pytest

from metrics.catalogue import METRICS
from tests.observability.chain import alertmanager, get, node_exporter, text
from tests.observability.conftest import Watched

pytestmark = pytest.mark.observability

PAGED_TIMEOUT_S = 150.0


def test_eight_refused_workers_are_one_notification_with_the_reason(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight workers are refused and killed at once: my pager gets one message, and it says why and what to do."""
    told_at, notification = watched.chain.receiver.wait("/page", PAGED_TIMEOUT_S, alertname="KVRegSpecRejected", model_name="refused")
    [alert] = notification["alerts"]
    assert alert["annotations"]["summary"] == "8 process(es) of refused refused: mamba_cache_mode"
    assert "kvreg explain mamba_cache_mode" in alert["annotations"]["description"]
    assert alert["labels"]["reason"] == "mamba_cache_mode"
    assert alert["labels"]["stage"] == "validate"
    # Alertmanager holds nothing else to tell about this engine, and has told it once.
    groups = get(f"http://{watched.chain.alertmanager}/api/v2/alerts/groups")
    mine = [alert for group in groups for alert in group["alerts"] if alert["labels"].get("model_name") == "refused"]
    assert [alert["labels"]["alertname"] for alert in mine] == ["KVRegSpecRejected"]
    assert len(watched.chain.receiver.notifications("/page", model_name="refused")) == 1
    with capsys.disabled():
        print(f"\n{told_at - watched.refused_at:.1f} s from eight refusals to one notification")


def test_a_failed_transfer_is_told_with_its_reason_and_not_as_a_refused_spec(watched: Watched) -> None:
    """The backend said no: I am told that the registration failed, and the backend's reason."""
    _, notification = watched.chain.receiver.wait("/page", PAGED_TIMEOUT_S, alertname="KVRegRunFailed", model_name="failing")
    assert "transfer_refused" in notification["alerts"][0]["annotations"]["description"]
    assert not watched.chain.receiver.notifications("/page", alertname="KVRegSpecRejected", model_name="failing")


def test_the_heartbeat_arrives_while_ledgers_are_read(watched: Watched) -> None:
    """The dead man's switch hears from the chain."""
    watched.chain.receiver.wait("/heartbeat", PAGED_TIMEOUT_S, alertname="KVRegWatchdog")


def test_a_worker_that_registered_pages_nobody(watched: Watched) -> None:
    """An engine whose workers registered is no news."""
    watched.chain.receiver.wait("/page", PAGED_TIMEOUT_S, model_name="refused")
    for path in ("/page", "/ticket"):
        assert not watched.chain.receiver.notifications(path, model_name="steady")


def test_each_worker_has_a_bounded_number_of_series(watched: Watched) -> None:
    """However often it is refused, a worker has the series of the catalogue and no more."""
    # A histogram is its buckets, +Inf among them, its sum and its count.
    series = {metric.name: len(metric.series) * (len(metric.buckets) + 3 if metric.buckets else 1) for metric in METRICS}
    counted = watched.chain.query('count by (model_name, worker_id) ({job="kvreg-ledger", __name__=~"kvreg_.*"})')
    assert len(counted) == 2 + 1 + 1 + 8
    assert {int(row["value"][1]) for row in counted} == {sum(series.values())}


def test_a_file_that_cannot_be_parsed_is_told_and_hides_no_ledger(watched: Watched, tmp_path: Path) -> None:
    """Somebody writes rubbish into the ledger directory: node_exporter says so, and still serves the ledgers."""
    ledgers = tmp_path / "ledgers"
    shutil.copytree(watched.chain.ledgers, ledgers)
    (ledgers / "rubbish.prom").write_text("no metrics at all {\n")
    with node_exporter(ledgers, tmp_path) as address:
        served = text(f"http://{address}/metrics?collect[]=textfile").splitlines()
    assert "node_textfile_scrape_error 1" in served
    assert 'kvreg_runs_total{model_name="refused",outcome="rejected",role="worker",worker_id="7"} 1' in served


def test_a_loop_of_refusals_mutes_its_newest_refusal_and_no_other(watched: Watched, tmp_path: Path) -> None:
    """A crash loop is one message: its own refusals are not told beside it, another engine's are."""
    config = tmp_path / "alertmanager.yml"
    shutil.copy(watched.chain.folder / "alertmanager.yml", config)
    labels = {"severity": "critical", "namespace": "ml", "model_name": "m", "stage": "edit", "rule": "none", "reason": "width"}
    with alertmanager(config, tmp_path) as address:
        for changed in (
            {"alertname": "KVRegRejectionLoop"},
            {"alertname": "KVRegSpecRejected"},
            {"alertname": "KVRegWorkersDisagree"},
            {"alertname": "KVRegSpecRejected", "model_name": "other"},
            {"alertname": "KVRegWorkersDisagree", "model_name": "unrelated"},
        ):
            add = [f"{name}={value}" for name, value in {**labels, **changed}.items()]
            subprocess.run(["amtool", "alert", "add", f"--alertmanager.url=http://{address}", *add], check=True, capture_output=True)
        alerts = get(f"http://{address}/api/v2/alerts")
    muted = {(alert["labels"]["alertname"], alert["labels"]["model_name"]) for alert in alerts if alert["status"]["state"] == "suppressed"}
    assert len(alerts) == 5
    assert muted == {("KVRegSpecRejected", "m"), ("KVRegWorkersDisagree", "m")}
