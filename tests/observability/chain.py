"""The whole chain on loopback: node_exporter, Prometheus, Alertmanager and whoever is told, with the shipped configuration.

Ports and folders are replaced, and the engines' own scrape job is left out; intervals, rules, routes and receivers are
those of `deploy/`.
"""

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
START_TIMEOUT_S = 60.0

Found = TypeVar("Found")


class Receiver(ThreadingHTTPServer):
    """Whoever Alertmanager tells: keeps each notification with the path it came to and the time it came at."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Post)
        self.told: list[tuple[float, str, dict[str, Any]]] = []
        self.news = threading.Condition()

    def notifications(self, path: str, **labels: str) -> list[tuple[float, dict[str, Any]]]:
        """What came to one path, of groups with these labels."""
        return [(at, told) for at, to, told in self.told if to == path and labels.items() <= told["groupLabels"].items()]

    def wait(self, path: str, timeout_s: float, **labels: str) -> tuple[float, dict[str, Any]]:
        """The first of these notifications, with the time it came at; raises TimeoutError."""
        with self.news:
            if not self.news.wait_for(lambda: self.notifications(path, **labels), timeout_s):
                raise TimeoutError(f"no notification of {labels} at {path} within {timeout_s} s")
        return self.notifications(path, **labels)[0]


class _Post(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.news:
            self.server.told.append((time.time(), self.path, told))
            self.server.news.notify_all()
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Nothing."""


class Chain(AbstractContextManager["Chain"]):
    """`with Chain(folder) as chain:` runs all of it; ledgers go to `chain.ledgers`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledgers = folder / "ledgers"
        self.receiver = Receiver()
        self.exporter = self.alertmanager = self.prometheus = ""
        self._running = ExitStack()

    def __enter__(self) -> "Chain":
        self.ledgers.mkdir(parents=True)
        try:
            self._running.callback(self.receiver.server_close)
            self._running.callback(self.receiver.shutdown)
            threading.Thread(target=self.receiver.serve_forever, daemon=True).start()
            self.exporter = self._running.enter_context(node_exporter(self.ledgers, self.folder))
            self.alertmanager = self._running.enter_context(alertmanager(self._alertmanager_config(), self.folder))
            self.prometheus = self._running.enter_context(prometheus(self._prometheus_config(), self.folder))
            eventually(lambda: self.query('up{job="kvreg-ledger"} == 1'), START_TIMEOUT_S)
        except BaseException:
            self._running.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._running.close()

    def work(self, *engines: str) -> float:
        """Run the workers of engines, MODEL:OUTCOME:COUNT each, to their end by SIGKILL (workers.py); returns when they began."""
        command = [sys.executable, "-m", "tests.observability.workers", str(self.ledgers), *engines]
        return float(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout)

    def query(self, promql: str) -> list[dict[str, Any]]:
        """The rows of an instant query."""
        return list(get(f"http://{self.prometheus}/api/v1/query?{urlencode({'query': promql})}")["data"]["result"])

    def query_range(self, promql: str, seconds: float, step_s: float) -> list[dict[str, Any]]:
        """The rows of a query over the last `seconds`."""
        now = time.time()
        asked = urlencode({"query": promql, "start": now - seconds, "end": now, "step": step_s})
        return list(get(f"http://{self.prometheus}/api/v1/query_range?{asked}")["data"]["result"])

    def _prometheus_config(self) -> Path:
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        config["rule_files"] = [str(DEPLOY / "prometheus" / file) for file in config["rule_files"]]
        config["alerting"]["alertmanagers"][0]["static_configs"] = [{"targets": [self.alertmanager]}]
        config["scrape_configs"] = [job for job in config["scrape_configs"] if job["job_name"] == "kvreg-ledger"]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [self.exporter]}]
        return self._written("prometheus.yml", config)

    def _alertmanager_config(self) -> Path:
        config = yaml.safe_load((DEPLOY / "alertmanager" / "alertmanager.yml").read_text())
        for receiver in config["receivers"]:
            receiver["webhook_configs"][0]["url"] = f"http://127.0.0.1:{self.receiver.server_port}/{receiver['name']}"
        return self._written("alertmanager.yml", config)

    def _written(self, name: str, config: dict[str, Any]) -> Path:
        path = self.folder / name
        path.write_text(yaml.safe_dump(config))
        return path


def node_exporter(ledgers: Path, folder: Path) -> AbstractContextManager[str]:
    """Serves a ledger directory; yields its address."""
    options = ("--collector.disable-defaults", "--collector.textfile", f"--collector.textfile.directory={ledgers}")
    return _running(folder, "/metrics", "prometheus-node-exporter", *options)


def alertmanager(config: Path, folder: Path) -> AbstractContextManager[str]:
    """Tells the receivers of a configuration; yields its address."""
    options = (f"--config.file={config}", f"--storage.path={folder / 'alertmanager'}", "--cluster.listen-address=")
    return _running(folder, "/-/ready", "prometheus-alertmanager", *options)


def prometheus(config: Path, folder: Path) -> AbstractContextManager[str]:
    """Scrapes and evaluates by a configuration; yields its address."""
    return _running(folder, "/-/ready", "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'prometheus'}")


@contextmanager
def _running(folder: Path, ready: str, program: str, *options: str) -> Iterator[str]:
    """A server on a free port of loopback, ready, for as long as the block lasts; its log is kept in `folder`."""
    assert shutil.which(program), f"apt-get install {program}"
    address = f"127.0.0.1:{_free_port()}"
    with (folder / f"{program}.log").open("w") as log:
        server = subprocess.Popen([program, *options, f"--web.listen-address={address}"], stdout=log, stderr=subprocess.STDOUT)
        try:
            eventually(lambda: _answers(f"http://{address}{ready}"), START_TIMEOUT_S)
            yield address
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def text(url: str) -> str:
    """The text at a URL."""
    with urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def get(url: str) -> Any:
    """The JSON at a URL."""
    with urlopen(url, timeout=10) as answer:
        return json.load(answer)


def eventually(look: Callable[[], Found], timeout_s: float) -> Found:
    """What `look` returns once that is true; raises TimeoutError with what it returned last."""
    end = time.monotonic() + timeout_s
    while not (found := look()):
        if time.monotonic() > end:
            raise TimeoutError(f"still {found!r} after {timeout_s} s")
        time.sleep(0.1)
    return found


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, ConnectionError, TimeoutError):
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        return int(opened.getsockname()[1])
