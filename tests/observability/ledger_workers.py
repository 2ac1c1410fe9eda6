"""Worker processes with a ledger, started at will: forked from one process that has imported everything.

As a script it reads one JSON object a line and answers one line each:

    {"start": {"directory", "mode", "instance", "rank", …}}              forks a worker that registers; answers {"pid"}
    {"outcome": pid}                                                     waits for its registration; answers {"outcome"}
    {"kill": pid}                                                        SIGKILL, and reaps it; answers {}

A worker stays alive after its registration, as an engine does until somebody ends it. `file_bytes` is the size at which
its files are full, and with `fork` it leaves a forked child of its own behind, which answers as "child".
"""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Workers:
    """The process that forks them, from a test."""

    def __init__(self, parent: "subprocess.Popen[str]") -> None:
        self._parent = parent
        self._alive: set[int] = set()

    def start(
        self, directory: Path, mode: str = "none", instance: str = "i", rank: int = 0, file_bytes: int | None = None, *, fork: bool = False
    ) -> int:
        """A worker that registers an offer of this Mamba cache mode (any but "align" and "all" is refused); its process id."""
        told = {"directory": str(directory), "mode": mode, "instance": instance, "rank": rank, "file_bytes": file_bytes, "fork": fork}
        pid = int(self._ask({"start": told})["pid"])
        self._alive.add(pid)
        return pid

    def outcome(self, pid: int) -> dict[str, Any]:
        """How its registration ended, once it has: the error's type, or "registered"."""
        return self._ask({"outcome": pid})

    def kill(self, pid: int) -> None:
        """SIGKILL."""
        self._ask({"kill": pid})
        self._alive.discard(pid)

    def close(self) -> None:
        """End every worker that is left, and their parent."""
        for pid in list(self._alive):
            self.kill(pid)
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        self._parent.wait()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(json.dumps(question) + "\n")
        self._parent.stdin.flush()
        answer: dict[str, Any] = json.loads(self._parent.stdout.readline())
        return answer


@contextmanager
def workers() -> Iterator[Workers]:
    """A parent that forks workers, until the end of the block."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.observability.ledger_workers"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        forked = Workers(parent)
        try:
            yield forked
        finally:
            forked.close()
            if parent.stdout:
                parent.stdout.close()


def _serve() -> None:
    from metrics.ledger import Ledger
    from tests.metrics.watched import run
    from tests.offers import hybrid

    def registered(told: dict[str, Any]) -> object:
        return run(hybrid(rank=told["rank"], mode=told["mode"]), [Ledger(told["directory"], told["instance"])])

    run(hybrid(), [])  # whatever the first registration of a process imports is there before the first fork
    pipes: dict[int, int] = {}
    for line in sys.stdin:
        ((verb, told),) = json.loads(line).items()
        if verb == "start":
            pid, pipe = _fork(told, registered)
            pipes[pid] = pipe
            answer: dict[str, Any] = {"pid": pid}
        elif verb == "outcome":
            answer = json.loads(_line(pipes[told]))
        else:
            os.kill(told, signal.SIGKILL)
            os.waitpid(told, 0)
            os.close(pipes.pop(told))
            answer = {}
        print(json.dumps(answer), flush=True)


def _fork(told: dict[str, Any], registered: Callable[[dict[str, Any]], object]) -> tuple[int, int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        _register(told, registered, writing)
        while True:
            signal.pause()
    finally:
        os._exit(1)


def _register(told: dict[str, Any], registered: Callable[[dict[str, Any]], object], answers: int) -> None:
    if told["file_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (told["file_bytes"], told["file_bytes"]))
    outcome = registered(told)
    answer = {"outcome": "registered" if told["mode"] in ("align", "all") else type(outcome).__name__}
    if told["fork"]:
        answer["child"] = str(os.fork())
        if answer["child"] == "0":
            while True:
                signal.pause()
    os.write(answers, (json.dumps(answer) + "\n").encode())


def _line(pipe: int) -> bytes:
    said = b""
    while not said.endswith(b"\n"):
        more = os.read(pipe, 4096)
        if not more:
            raise EOFError("the worker died before it answered")
        said += more
    return said


if __name__ == "__main__":
    _serve()
