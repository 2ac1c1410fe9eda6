"""What happens when vLLM loads its plug-ins: ledgers at zero before the model is, and never anything else."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from metrics.ledger import Ledger
from orchestrator import plugin
from orchestrator.config import ConfigError
from orchestrator.plugin import prepare, served
from tests.metrics.watched import run
from tests.offers import hybrid

SERVE = ["/usr/bin/vllm", "serve", "org/model"]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A ledger directory."""
    yield tmp_path
    Ledger(tmp_path).close()


def rejections(path: Path) -> dict[str, float]:
    """All refusals in a ledger, by model name."""
    samples = [sample for family in text_string_to_metric_families(path.read_text()) for sample in family.samples]
    found: dict[str, float] = {}
    for sample in samples:
        if sample.name == "kvreg_rule_rejections_total":
            found[sample.labels["model_name"]] = found.get(sample.labels["model_name"], 0) + sample.value
    return found


def transfer_config(**extra: object) -> str:
    return json.dumps({"kv_connector": "KVRegConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra})


@pytest.mark.parametrize(
    ("argv", "workers"),
    [
        (SERVE, [("org/model", "0")]),
        ([*SERVE, "-tp", "2"], [("org/model", "0"), ("org/model", "1")]),
        ([*SERVE, "--tensor-parallel-size=2", "--pipeline_parallel_size", "2"], [("org/model", str(rank)) for rank in range(4)]),
        ([*SERVE, "--served-model-name", "short", "other"], [("short", "0")]),
        (["server.py", "--model", "org/model"], [("org/model", "0")]),
        (["vllm", "serve", "--model=org/model"], [("org/model", "0")]),
        ([*SERVE, "--nnodes", "2"], []),
        ([*SERVE, "--data-parallel-size", "2"], []),
        ([*SERVE, "-dp=1"], [("org/model", "0")]),
        ([*SERVE, "-tp", "many"], []),
        (["vllm", "serve"], []),
        (["vllm", "serve", "--config", "x.yaml"], []),
        (["notebook"], []),
        ([], []),
    ],
)
def test_the_command_line_says_who_will_run(argv: list[str], workers: list[tuple[str, str]]) -> None:
    """The model's name and each worker, as `vllm serve` was called; nobody where that does not say."""
    assert list(served(argv)) == workers


def test_series_are_at_zero_while_the_model_loads(directory: Path) -> None:
    """The first refusal of a new engine is an increase from zero, for each of its workers."""
    prepare([*SERVE, "-tp", "2"], {"KVREG_LEDGER_DIR": str(directory), "KVREG_INSTANCE": "i"})
    assert sorted(path.name for path in directory.glob("*.prom")) == ["kvreg-i-0.prom", "kvreg-i-1.prom"]
    for rank in range(2):
        assert rejections(directory / f"kvreg-i-{rank}.prom") == {"org/model": 0}


def test_the_connectors_settings_come_before_the_environment(directory: Path) -> None:
    """The directory and instance of --kv-transfer-config are those that the connector will use."""
    extra = {"kvreg.ledger_dir": str(directory), "kvreg.instance": "set", "lmcache.mp.port": 5555}
    prepare([*SERVE, "--kv-transfer-config", transfer_config(**extra)], {"KVREG_LEDGER_DIR": "/proc/nowhere", "KVREG_INSTANCE": "env"})
    assert [path.name for path in directory.glob("*.prom")] == ["kvreg-set-0.prom"]


def test_without_a_directory_nothing_happens(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wants no ledger gets none, and pays nothing."""
    monkeypatch.chdir(directory)
    prepare(SERVE, {})
    assert list(directory.iterdir()) == []


def test_a_start_that_says_nothing_still_shows_that_kvreg_is_loaded(directory: Path) -> None:
    """An engine started from Python has a ledger from its first start on, and its first run makes it its own."""
    environ = {"KVREG_LEDGER_DIR": str(directory), "KVREG_INSTANCE": "i"}
    prepare(["serve.py"], environ)
    assert rejections(directory / "kvreg-i-0.prom") == {"": 0}
    run(hybrid(mode="none"), [Ledger(directory, "i")])
    assert rejections(directory / "kvreg-i-0.prom") == {"hybrid": 1}


def test_counts_are_kept_over_a_restart(directory: Path) -> None:
    """Loading the plug-ins, however often and with whatever command line, loses no refusal."""
    environ = {"KVREG_LEDGER_DIR": str(directory), "KVREG_INSTANCE": "i"}
    run(hybrid(mode="none"), [Ledger(directory, "i")])
    Ledger(directory).close()
    for argv in (["serve.py"], SERVE, ["serve.py"]):
        prepare(argv, environ)
    assert rejections(directory / "kvreg-i-0.prom") == {"hybrid": 1, "org/model": 0}
    run(hybrid(mode="none"), [Ledger(directory, "i")])
    assert rejections(directory / "kvreg-i-0.prom") == {"hybrid": 2}


def test_loading_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A setting that cannot be used stops the connector, with its own words, not the plug-ins of every process."""
    argv = [*SERVE, "--kv-transfer-config", transfer_config(**{"kvreg.made_up": 1})]
    with pytest.raises(ConfigError):
        prepare(argv, {})
    monkeypatch.setattr(sys, "argv", argv)
    with caplog.at_level(logging.ERROR, "kvreg"):
        plugin.load()
    assert "the ledgers were not prepared" in caplog.text


@pytest.mark.parametrize("config", ["{", "null", "[]", '{"kv_connector_extra_config": null}', '"x"', ""])
def test_a_transfer_config_that_cannot_be_read_is_vllms_to_refuse(directory: Path, config: str) -> None:
    """Broken JSON is reported by whoever needs it; the ledger is prepared all the same."""
    prepare([*SERVE, "--kv-transfer-config", config], {"KVREG_LEDGER_DIR": str(directory), "KVREG_INSTANCE": "i"})
    assert [path.name for path in directory.glob("*.prom")] == ["kvreg-i-0.prom"]


@pytest.mark.parametrize("place", ["/proc/kvreg", "/dev/null/x"])
def test_a_directory_that_cannot_be_had_is_logged(place: str, caplog: pytest.LogCaptureFixture) -> None:
    """The engine starts; the log says that its ledger could not be written."""
    with caplog.at_level(logging.ERROR, "kvreg"):
        prepare(SERVE, {"KVREG_LEDGER_DIR": place})
    assert "ledger.write_failed" in caplog.text


LOAD = """
import sys
from orchestrator.plugin import load
load()
assert "torch" not in sys.modules and "prometheus_client" not in sys.modules and "vllm" not in sys.modules
"""


def test_loading_without_a_ledger_imports_next_to_nothing() -> None:
    """Every process of every engine in an image with kvreg loads it: it must cost milliseconds."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run([sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
