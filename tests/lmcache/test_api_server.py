"""What an operator sees of real engines behind vLLM's API server: its own /metrics, the ledgers beside it, and no count twice.

Three engines are started, and every LMCache server comes up after its engine, as it may in production: one API server, two
of them, and one whose registration is refused but who serves on.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TypeAlias

import pytest
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("lmcache", reason="LMCache is not installed")
pytest.importorskip("vllm", reason="vLLM is not installed")

from metrics.catalogue import BUILD_INFO, METRICS, WORKER_LABELS
from tests.deploy.sources import ALERTS
from tests.lmcache import models
from tests.lmcache.api_server import MODEL_NAME, api_server
from tests.lmcache.harness import ENGINE_TIMEOUT_S, Server

pytestmark = [pytest.mark.lmcache, pytest.mark.engine]

CHUNK = 288
BLOCK, REFUSED_BLOCK = 32, 64
"""Tokens of a block: nine are a chunk; four and a half are not, and are refused."""

SCRAPES = 4
TIMESTAMP = "_timestamp_seconds"
LEDGER_JOB = 'job="kvreg-ledger"'
Values: TypeAlias = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass(frozen=True)
class Seen:
    """What one engine showed: its ledgers while it waited for its LMCache server, then /metrics several times, then the ledgers."""

    while_waiting: str
    scrapes: tuple[str, ...]
    ledgers: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models, logs and ledgers go."""
    assert any(point.name == "kvreg" for point in entry_points(group="vllm.general_plugins")), "kvreg is not installed: pip install -e ."
    return tmp_path_factory.mktemp("api_server")


def watch(folder: Path, name: str, extra: dict[str, str], *options: str) -> Seen:
    """Start an engine, then its LMCache server; ask for completions, scrape, and end both."""
    model = models.write_model(folder / "model", models.LLAMA)
    cache = Server(folder / f"{name}-lmcache.log", CHUNK)
    try:
        patient = {**cache.transfer, "kvreg.register_timeout_s": ENGINE_TIMEOUT_S}
        with api_server(folder / name, model, {**patient, **extra}, *options) as engine:
            engine.until(lambda: "waiting for the LMCache server" in engine.text, "the engine waited for its LMCache server")
            while_waiting = engine.ledgers_text()
            cache.start()
            engine.until_ready()
            engine.complete(1, CHUNK + 8)
            engine.until(lambda: "kvreg_runs_total{" in engine.scrape(), "the first step's counts were shown")
            for seed in range(2, 2 + SCRAPES):
                engine.complete(seed, CHUNK + 8)
            return Seen(while_waiting, tuple(engine.scrape() for _ in range(SCRAPES)), engine.ledgers_text())
    finally:
        cache.stop()


@pytest.fixture(scope="module")
def one(folder: Path) -> Seen:
    """An engine that registered, behind one API server."""
    return watch(folder, "one", {}, "--block-size", str(BLOCK))


@pytest.fixture(scope="module")
def two(folder: Path) -> Seen:
    """An engine that registered, behind two API servers, which share a metrics directory."""
    return watch(folder, "two", {}, "--block-size", str(BLOCK), "--api-server-count", "2")


@pytest.fixture(scope="module")
def bypassed(folder: Path) -> Seen:
    """An engine that was refused for its block size, and serves without the external cache."""
    return watch(folder, "bypassed", {"kvreg.on_refusal": "bypass"}, "--block-size", str(REFUSED_BLOCK))


@pytest.fixture(params=["one", "two"])
def registered(request: pytest.FixtureRequest) -> Seen:
    """Each engine that registered."""
    seen: Seen = request.getfixturevalue(request.param)
    return seen


def families(text: str) -> Iterator[Family]:
    """kvreg's metrics in a scraped text, without the times at which prometheus-client made them."""
    names = {metric.name.removesuffix("_total") for metric in METRICS}
    return (family for family in text_string_to_metric_families(text) if family.name in names)


def values(text: str) -> Values:
    """kvreg's samples, by name and sorted labels. Fails where one is there twice."""
    found: Values = {}
    for family in families(text):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                key = sample.name, tuple(sorted(sample.labels.items()))
                assert key not in found, f"shown twice: {key}"
                found[key] = sample.value
    return found


def without(label: str, samples: Values) -> Values:
    """The samples without one of their labels, which each of them must have."""
    assert all(label in dict(labels) for _, labels in samples)
    return {(name, tuple(pair for pair in labels if pair[0] != label)): value for (name, labels), value in samples.items()}


def of(samples: Values, name: str, **wanted: str) -> dict[tuple[str, ...], float]:
    """One metric's samples that have these labels, by the values of their other ones but the worker's and the engine's."""
    told = {*WORKER_LABELS, "engine", *wanted}
    return {
        tuple(value for label, value in labels if label not in told): value
        for (found, labels), value in samples.items()
        if found == name and wanted.items() <= dict(labels).items()
    }


def help_lines(text: str) -> list[tuple[str, str]]:
    """Name and text of each help line of kvreg's metrics."""
    lines = [tuple(line.split(" ", 3)[2:]) for line in text.split("\n") if line.startswith("# HELP kvreg_")]
    return [(name, words) for name, words in lines if not name.endswith("_created")]


# ------------------------------------------------------------------------------------------------------ engines that live


def test_a_registration_is_on_vllms_metrics_once_with_vllms_labels(registered: Seen) -> None:
    """I look at the engine's /metrics after the first completion: one registration, however many API servers and scrapes."""
    for scrape in registered.scrapes:
        seen = values(scrape)
        worker = {"engine": "0", "model_name": MODEL_NAME, "role": "worker", "worker_id": "0"}
        assert {key: value for key, value in seen.items() if key[0] == "kvreg_runs_total"} == {
            ("kvreg_runs_total", tuple(sorted({**worker, "outcome": "registered"}.items()))): 1
        }
        assert list(of(seen, "kvreg_build_info").values()) == [1]
        assert of(seen, "kvreg_registered_groups") == {(): 1}
        assert of(seen, "kvreg_registered_layers") == {(): models.LLAMA["num_hidden_layers"]}
        assert all(dict(labels).items() >= worker.items() for _, labels in seen)


def test_the_ledger_holds_the_same_values_without_vllms_label(registered: Seen) -> None:
    """The textfile and /metrics agree on every value, and what only the ledger shows is zero.

    But for timestamps, which each of them takes as it is told: they are milliseconds apart.
    """
    ledger = values(registered.ledgers)
    assert not any("engine" in dict(labels) for _, labels in ledger)
    for scrape in registered.scrapes:
        engine = without("engine", values(scrape))
        assert engine.keys() <= ledger.keys()
        assert {key: (value, ledger[key]) for key, value in engine.items() if ledger[key] != value and not key[0].endswith(TIMESTAMP)} == {}
        assert {value for key, value in ledger.items() if key not in engine} == {0}
    assert of(ledger, "kvreg_runs_total") == {("cancelled",): 0, ("failed",): 0, ("registered",): 1, ("rejected",): 0}


def test_each_name_has_one_help_text_wherever_it_is_seen(one: Seen, two: Seen) -> None:
    """Prometheus meets a name from the ledger and from one or two API servers, and always reads the same explanation."""
    catalogue = {metric.name: metric.help for metric in METRICS}
    assert dict(help_lines(one.ledgers)) == catalogue
    for scrape in (*one.scrapes, *two.scrapes):
        lines = help_lines(scrape)
        assert len(lines) == len(dict(lines))
        assert dict(lines).items() <= catalogue.items()
    assert all(dict(help_lines(scrape)) == catalogue for scrape in one.scrapes)


def test_lmcaches_own_metrics_are_still_there(registered: Seen) -> None:
    """I replaced LMCache's connector, and its dashboard goes on working: every completion's lookup is timed."""
    for scrape in registered.scrapes:
        counts = re.findall(r"^vllm:lmcache_mp_lookup_duration_seconds_count\{.*\} (\S+)$", scrape, re.MULTILINE)
        assert [float(count) for count in counts] == [1 + SCRAPES]


# ------------------------------------------------------------------------------------------- an engine that was refused


def test_vllm_loads_the_plug_in_and_every_series_is_at_zero_before_the_engine_registers(one: Seen, bypassed: Seen) -> None:
    """The engine still waits for its LMCache server, and a scrape finds all that may ever be counted, at zero."""
    for seen in (one, bypassed):
        waiting = values(seen.while_waiting)
        expected = {
            (metric.name, MODEL_NAME, "worker", "0", *labels)
            for metric in METRICS
            if metric.type != "histogram"
            for labels in metric.series
        }
        order = {metric.name: metric.label_names for metric in METRICS}
        assert expected == {(name, *(dict(labels)[label] for label in order[name])) for name, labels in waiting if name in order}
        assert {key for key, value in waiting.items() if value} == {key for key in waiting if key[0] == BUILD_INFO.name}


def test_a_first_refusal_is_an_increase_of_one_series(bypassed: Seen) -> None:
    """The worker was refused for one reason: that counter went from 0 to 1, in the ledger and on /metrics, and no other."""
    before, after = values(bypassed.while_waiting), values(bypassed.ledgers)
    refused = ("chunk_size", "none", "validate")
    assert of(before, "kvreg_rule_rejections_total", role="worker")[refused] == 0
    increased = {key for key, value in of(after, "kvreg_rule_rejections_total", role="worker").items() if value}
    assert increased == {refused}
    assert of(after, "kvreg_runs_total", role="worker") == {("cancelled",): 0, ("failed",): 0, ("registered",): 0, ("rejected",): 1}
    for scrape in bypassed.scrapes:
        live = values(scrape)
        assert of(live, "kvreg_rule_rejections_total", role="worker") == {refused: 1}
        assert of(live, "kvreg_runs_total", role="worker") == {("rejected",): 1}
        assert of(live, "kvreg_bypassed", role="worker") == {(): 1}


def test_the_alert_rules_do_not_count_twice(bypassed: Seen, tmp_path: Path) -> None:
    """Prometheus scrapes both the ledgers and the living engine, and an alert counts each of its parties once.

    Refused are the worker and the scheduler. Without their job selector the rules would count four.
    """
    assert shutil.which("promtool"), "apt-get install prometheus"
    fired = {
        "KVRegSpecRejected": f'{{model_name="{MODEL_NAME}", reason="chunk_size", rule="none", stage="validate"}}',
        "KVRegBypassed": f'{{model_name="{MODEL_NAME}"}}',
    }
    questions = [(rule["expr"], fired.get(name), 2) for name, rule in ALERTS.items()]
    unselected = {name: re.sub(rf"{LEDGER_JOB}(, )?", "", ALERTS[name]["expr"]) for name in fired}
    questions += [(expr, fired[name], 4) for name, expr in unselected.items()]
    told = {
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [*input_series(bypassed.ledgers, LEDGER_JOB), *input_series(bypassed.scrapes[-1], 'job="vllm"')],
                "promql_expr_test": [
                    {"expr": expr, "eval_time": "10m", "exp_samples": [{"labels": labels, "value": value}] if labels else []}
                    for expr, labels, value in questions
                ],
            }
        ],
    }
    (tmp_path / "twice.yml").write_text(json.dumps(told))
    ran = subprocess.run(["promtool", "test", "rules", "twice.yml"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def input_series(text: str, job: str) -> list[dict[str, str]]:
    """What was scraped, as promtool takes it: there from the fifth minute on, the refusal being in the ninth."""
    samples = values(text)
    latest = max(value for (name, _), value in samples.items() if name.endswith(TIMESTAMP))
    found = []
    for (name, labels), value in samples.items():
        shown = value - latest + 540 if name.endswith(TIMESTAMP) and value else value
        pairs = ", ".join([job, *(f"{label}={json.dumps(text)}" for label, text in labels)])
        found.append({"series": f"{name}{{{pairs}}}", "values": f"_x5 {shown:f}x10"})
    return found
