"""Counts on vLLM's own /metrics, through vLLM's own classes: added up over workers and steps, under the ledger's names."""

import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from metrics.counts import CountsObserver
from metrics.prometheus import PrometheusObserver
from tests.metrics.watched import run
from tests.offers import hybrid

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM and torch deprecate of their own is theirs
    pytest.importorskip("vllm")
    import msgspec
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    from orchestrator.engine_stats import RegistrationPromMetrics, RegistrationStats, drained

pytestmark = pytest.mark.engine

LABELS = ["model_name", "engine"]
TYPES: dict[Any, Any] = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}


class Connector:
    """As much of a connector as vLLM asks for its statistics."""

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> RegistrationStats:
        return RegistrationStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *told: Any) -> RegistrationPromMetrics:
        return RegistrationPromMetrics(*told)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A vLLM configuration that names this connector."""
    monkeypatch.setattr(KVConnectorFactory, "get_connector_class", lambda *told: Connector)
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector="Connector"))


@pytest.fixture
def prom(config: Any, request: pytest.FixtureRequest) -> KVConnectorProm:
    """vLLM's API server's side, for two engines that serve a model named like the test: what it shows stays for the process' life."""
    return KVConnectorProm(config, LABELS, {engine: [request.node.name, str(engine)] for engine in (0, 1)})


def stats(rank: int = 0, mode: str = "align", runs: int = 1) -> RegistrationStats:
    """What one worker has to tell after its registrations."""
    counts = CountsObserver(clock=lambda: 100.0 + rank)
    for _ in range(runs):
        run(hybrid(rank=rank, mode=mode), [counts])
    told = drained(counts)
    assert told is not None
    assert drained(counts) is None
    return told


def exposed(prom: KVConnectorProm, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """What /metrics shows of a name, by these labels, without zeros."""
    model_name = prom.prom_metrics.per_engine_labelvalues[0][0]
    families = text_string_to_metric_families(generate_latest(REGISTRY).decode())
    samples = [sample for family in families for sample in family.samples if sample.name == name and sample.value]
    return {
        tuple(sample.labels[label] for label in labels): sample.value for sample in samples if sample.labels["model_name"] == model_name
    }


def test_counts_reach_metrics_with_the_engines_labels(prom: KVConnectorProm) -> None:
    """A registration of engine 1 is shown as engine 1's, under the name the engine serves its model by."""
    prom.observe(stats(rank=3).to_dict(), 1)
    served = "test_counts_reach_metrics_with_the_engines_labels"
    assert exposed(prom, "kvreg_runs_total", "model_name", "engine", "role", "worker_id", "outcome") == {
        (served, "1", "worker", "3", "registered"): 1
    }
    assert exposed(prom, "kvreg_registered_layers", "engine", "worker_id") == {("1", "3"): 4}
    assert exposed(prom, "kvreg_run_last_started_timestamp_seconds", "worker_id") == {("3",): 103}
    assert exposed(prom, "kvreg_stage_duration_seconds_count", "worker_id", "stage")[("3", "edit")] == 1


def test_one_name_has_one_help_and_type_everywhere(prom: KVConnectorProm) -> None:
    """Prometheus joins the ledger's series and the engine's without a conflict, and the label `engine` tells them apart."""
    prom.observe(stats(mode="none").to_dict())
    ledger = PrometheusObserver()
    run(hybrid(mode="none"), [ledger])

    def families(text: str) -> dict[str, Any]:
        named = {family.name: family for family in text_string_to_metric_families(text) if family.name.startswith("kvreg")}
        return {name: family for name, family in named.items() if not name.endswith("_created")}  # prometheus-client's own

    ours, engines = families(ledger.text()), families(generate_latest(REGISTRY).decode())
    assert {name: (family.type, family.documentation) for name, family in ours.items()} == {
        name: (family.type, family.documentation) for name, family in engines.items()
    }
    assert all("engine" not in sample.labels for family in ours.values() for sample in family.samples)
    of_engines = [sample for family in engines.values() for sample in family.samples]
    assert of_engines
    assert all({*sample.labels} >= {"engine", "model_name", "role", "worker_id"} for sample in of_engines)


def test_workers_are_added_up_by_vllm_without_mixing(prom: KVConnectorProm) -> None:
    """Two ranks' statistics of one step, one of them refused: what vLLM aggregates shows each rank."""
    outputs = [
        ModelRunnerOutput(
            req_ids=[], req_id_to_index={}, kv_connector_output=KVConnectorOutput(kv_connector_stats=pickle.loads(pickle.dumps(told)))
        )
        for told in (stats(rank=0), stats(rank=1, mode="none", runs=2))
    ]
    together = KVOutputAggregator(2).aggregate(outputs).kv_connector_output.kv_connector_stats
    prom.observe(together.to_dict())
    assert exposed(prom, "kvreg_runs_total", "worker_id", "outcome") == {("0", "registered"): 1, ("1", "rejected"): 2}
    assert exposed(prom, "kvreg_rule_rejections_total", "worker_id", "stage", "rule", "reason") == {
        ("1", "validate", "none", "mamba_cache_mode"): 2
    }


def test_steps_add_up(prom: KVConnectorProm) -> None:
    """Counts of a later step come on top, a gauge is its newest value, and a step without counts changes nothing."""
    for told in (stats(), stats(mode="none"), RegistrationStats()):
        prom.observe(told.to_dict())
    assert exposed(prom, "kvreg_runs_total", "outcome") == {("registered",): 1, ("rejected",): 1}
    assert exposed(prom, "kvreg_registered_layers", "worker_id") == {}


def test_statistics_survive_vllms_message_to_the_api_server(prom: KVConnectorProm) -> None:
    """What the scheduler packs, the API server unpacks: plain values of msgpack."""
    packed = msgspec.msgpack.encode(stats(mode="none").to_dict())
    prom.observe(msgspec.msgpack.decode(packed, type=dict[str, Any]))
    assert exposed(prom, "kvreg_runs_total", "outcome") == {("rejected",): 1}


def test_vllms_log_line_says_how_registrations_ended(config: Any) -> None:
    """Every few seconds vLLM logs what its connector did; after a registration that says so, and then nothing."""
    logging, lines = KVConnectorLogging(config.kv_transfer_config), []
    logging.observe(stats(runs=2).to_dict())
    logging.observe(stats(rank=1, mode="none").to_dict())
    for _ in range(2):
        logging.log(lambda text, *values: lines.append(text % values))
    assert lines == ["KV Transfer metrics: Registrations registered=2, Registrations rejected=1"]


def test_empty_statistics_are_empty() -> None:
    """vLLM sends nothing for a connector that counted nothing."""
    told = stats()
    assert not told.is_empty()
    told.reset()
    assert told.is_empty()
    assert RegistrationStats().is_empty()


def test_an_engine_that_is_made_again_in_one_process_starts(config: Any) -> None:
    """vLLM sets its metrics up anew and takes back only its own names: ours are there already, and that is no error."""
    first = KVConnectorProm(config, LABELS, {0: ["again", "0"]})
    second = KVConnectorProm(config, LABELS, {0: ["again", "0"]})
    first.observe(stats().to_dict())
    second.observe(stats().to_dict())
    assert exposed(second, "kvreg_runs_total", "outcome")[("registered",)] == 2


SERVERS = """
import os, sys
from types import SimpleNamespace
from prometheus_client import Counter, Gauge, Histogram
from orchestrator.engine_stats import RegistrationPromMetrics, RegistrationStats, drained
from metrics.counts import CountsObserver
from tests.metrics.watched import run
from tests.offers import hybrid
from vllm.v1.metrics.prometheus import get_prometheus_registry
from prometheus_client import generate_latest

def server(rank):
    metrics = RegistrationPromMetrics(SimpleNamespace(kv_transfer_config=None), {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
                                      ["model_name", "engine"], {0: ["served", "0"]})
    counts = CountsObserver(clock=lambda: 100.0)
    run(hybrid(rank=rank), [counts])
    metrics.observe(drained(counts).to_dict())

for rank in (0, 1):
    pid = os.fork()
    if pid == 0:
        server(rank)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
print(generate_latest(get_prometheus_registry()).decode())
"""


def test_two_api_servers_show_each_count_once(tmp_path: Path) -> None:
    """With PROMETHEUS_MULTIPROC_DIR, as vLLM sets it for several API servers, the files of both add up to what was counted."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", SERVERS], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    samples = [sample for family in text_string_to_metric_families(ran.stdout) for sample in family.samples]
    runs = {sample.labels["worker_id"]: sample.value for sample in samples if sample.name == "kvreg_runs_total"}
    layers = {
        sample.labels["worker_id"]: (sample.value, "pid" in sample.labels) for sample in samples if sample.name == "kvreg_registered_layers"
    }
    assert runs == {"0": 1, "1": 1}
    assert layers == {"0": (4, False), "1": (4, False)}
