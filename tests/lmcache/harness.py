"""Real LMCache servers and real engines, each a process of its own that a test starts, waits for and ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 600.0
ENGINE_TIMEOUT_S = 1800.0

# What LMCache gives up after, none of it reached here however busy the machine is: nothing under test depends on it.
PATIENCE_S = 3600

# An engine of several workers spins while it waits, and on few cores its server would wait for minutes: the server goes first.
ENGINE_NICENESS = 5


def free_port() -> int:
    """A port that nothing listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """An `lmcache server` process. `stop` kills it outright, `start` brings up a new one on the same port."""

    log: Path
    chunk_size_tokens: int
    arguments: Sequence[str] = ("--separate-object-groups",)
    port: int = field(default_factory=free_port)
    http_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Server":
        """Start it and wait until it answers."""
        command = [
            str(Path(sys.executable).with_name("lmcache")), "server", "--host", "127.0.0.1", "--port", str(self.port),
            "--http-host", "127.0.0.1", "--http-port", str(self.http_port), "--chunk-size", str(self.chunk_size_tokens),
            "--l1-size-gb", "1", "--eviction-policy", "LRU", "--worker-reap-timeout-seconds", str(PATIENCE_S),
            "--l1-read-ttl-seconds", str(PATIENCE_S), "--l1-write-ttl-seconds", str(PATIENCE_S),
            "--supported-transfer-mode", "lmcache_driven", *self.arguments,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.log.parent, env=environment())
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.2)
        return self

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/healthcheck", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        """Kill it, as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    @property
    def transfer(self) -> dict[str, Any]:
        """The extra config by which a connector finds this server.

        On a busy machine a ping takes longer than LMCache's ten seconds, and the cache is then left alone for a while.
        """
        return {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": self.port,
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            "lmcache.mp.heartbeat_interval": PATIENCE_S,
            "lmcache.mp.mq_timeout": PATIENCE_S,
        }


@contextmanager
def server(folder: Path, chunk_size_tokens: int, *arguments: str) -> Iterator[Server]:
    """A running server, killed at the end."""
    running = Server(folder / "server.log", chunk_size_tokens, ("--separate-object-groups", *arguments))
    try:
        yield running.start()
    finally:
        running.stop()


KVREG = {"kv_connector": "KVRegConnector", "kv_connector_module_path": "orchestrator.connector", "kv_role": "kv_both"}
STOCK = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
IDLE = {"kv_connector": "IdleConnector", "kv_connector_module_path": "tests.lmcache.idle", "kv_role": "kv_both"}


class Engine:
    """An engine process, running its steps. Its whole output goes to `log`."""

    def __init__(self, folder: Path, name: str, spec: dict[str, Any], variables: dict[str, str] | None = None) -> None:
        self.log = folder / f"{name}.log"
        self.out = folder / f"{name}.out.json"
        self.out.unlink(missing_ok=True)
        spec_file = folder / f"{name}.spec.json"
        spec_file.write_text(json.dumps(spec))
        self._log: TextIO = self.log.open("w")
        self.process = subprocess.Popen(
            engine_command(sys.executable, "-m", "tests.lmcache.engine", str(spec_file), str(self.out)),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment(variables),
            process_group=0,
        )

    def result(self) -> list[dict[str, Any]]:
        """What each generated prompt gave. Fails with the end of the log if the engine did."""
        code = self.wait()
        assert code == 0, f"engine exited {code}:\n{self.text[-6000:]}"
        seen: list[dict[str, Any]] = json.loads(self.out.read_text())
        return seen

    def wait(self) -> int:
        """The exit code, once it has ended."""
        try:
            return self.process.wait(ENGINE_TIMEOUT_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the engine and the workers it spawned."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()

    @property
    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")


def engine_command(*command: str) -> list[str]:
    """The command of an engine, which lets the LMCache server go first."""
    return ["nice", "-n", str(ENGINE_NICENESS), *command]


def environment(variables: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of every process started here."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_COLOR": "0",
        "LMCACHE_TRACK_USAGE": "false",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        **(variables or {}),
    }


def prompt(seed: int, tokens: int, vocabulary: int = 1000) -> list[int]:
    """Token ids that differ for every seed from the first on."""
    return [1 + (seed * 7919 + index * (7 + 2 * seed) + index * index % (11 + seed)) % vocabulary for index in range(tokens)]
