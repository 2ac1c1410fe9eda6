"""The ledger in the hands of those who read it: promtool and node_exporter, as Debian ships them."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from metrics.ledger import Ledger
from tests.metrics.watched import run
from tests.observability.ledger_workers import Workers, workers
from tests.offers import hybrid

pytestmark = pytest.mark.observability

START_TIMEOUT_S = 30.0


def program(name: str) -> str:
    """Where a Debian program is; skipped where it is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (Debian packages prometheus and prometheus-node-exporter)")
    return path


@pytest.fixture(scope="module")
def forked() -> Iterator[Workers]:
    """Worker processes at will."""
    with workers() as running:
        yield running


@contextmanager
def exporter(directory: Path) -> Iterator[str]:
    """node_exporter on a directory; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = ["--collector.disable-defaults", "--collector.textfile", f"--collector.textfile.directory={directory}"]
    command = [program("prometheus-node-exporter"), *options, f"--web.listen-address={address}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            until = time.monotonic() + START_TIMEOUT_S
            while not _answers(address) and time.monotonic() < until:
                assert running.poll() is None, "node_exporter ended"
            yield address
        finally:
            running.terminate()


def served(address: str) -> dict[tuple[str, str], float]:
    """What an exporter serves of each worker: values by name and worker id, of the series that are not zero."""
    with urlopen(f"http://{address}/metrics", timeout=START_TIMEOUT_S) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name, sample.labels.get("worker_id", "")): sample.value for family in families for sample in family.samples if sample.value
    }


def _answers(address: str) -> bool:
    try:
        with urlopen(f"http://{address}/metrics", timeout=1):
            return True
    except (URLError, OSError):
        return False


@pytest.mark.parametrize("mode", ["align", "none"])
def test_promtool_finds_nothing_to_say(tmp_path: Path, forked: Workers, mode: str) -> None:
    """`promtool check metrics` is clean on a worker's real ledger: names, units, types and help texts."""
    pid = forked.start(tmp_path, mode=mode)
    forked.outcome(pid)
    forked.kill(pid)
    text = (tmp_path / "kvreg-i-0.prom").read_text()
    checked = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    assert "kvreg_runs_total" in text


def test_node_exporter_serves_what_dead_workers_counted(tmp_path: Path, forked: Workers) -> None:
    """Eight workers refused, killed, and started again: two refusals each, without an error of the collector."""
    for _ in range(2):
        pids = [forked.start(tmp_path, instance=f"i-{rank}", rank=rank) for rank in range(8)]
        for pid in pids:
            forked.outcome(pid)
            forked.kill(pid)
    with exporter(tmp_path) as address:
        found = served(address)
    assert {found["kvreg_runs_total", str(rank)] for rank in range(8)} == {2.0}
    assert ("node_textfile_scrape_error", "") not in found


def test_node_exporter_sees_the_newest_pod(tmp_path: Path) -> None:
    """A pod of another name on the same host: what it refuses is served, not what its predecessor left."""
    for instance in ("pod-a", "pod-b"):
        run(hybrid(mode="none"), [Ledger(tmp_path, instance)])
        Ledger(tmp_path).close()
    with exporter(tmp_path) as address:
        assert served(address)["kvreg_runs_total", "0"] == 2.0


def test_node_exporter_never_meets_a_part_of_a_file(tmp_path: Path, forked: Workers) -> None:
    """Scraped while workers write and are killed, it reports no error and serves every series each time."""
    pid = forked.start(tmp_path)
    forked.outcome(pid)
    forked.kill(pid)
    with exporter(tmp_path) as address:
        for count in range(2, 22):
            pid = forked.start(tmp_path)
            found = served(address)
            assert ("node_textfile_scrape_error", "") not in found
            assert found["kvreg_runs_total", "0"] in {count - 1, count}
            forked.outcome(pid)
            forked.kill(pid)
        assert served(address)["kvreg_runs_total", "0"] == 21
