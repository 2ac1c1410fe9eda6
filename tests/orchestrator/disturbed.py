"""Worker processes that something happens to while the backend is asked: `python -m tests.orchestrator.disturbed FOLDER`.

Prints one JSON object: by name, how each ended. They are forked from this process, which has imported everything.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import anyio

from metrics.ledger import Ledger
from orchestrator.pipeline import Settings, register
from orchestrator.portal import run_sync
from stages.model import Plan
from tests.offers import hybrid


class Asked:
    """A backend that calls `asked` and then waits, until it is told not to; `held` is what it keeps."""

    name = "asked"

    def __init__(self, asked: Callable[[], None], waits: bool = True) -> None:
        self._asked = asked
        self._waits = waits
        self.held: list[Plan] = []

    async def register(self, plan: Plan) -> str:
        self.held.append(plan)
        try:
            self._asked()
            if self._waits:
                await anyio.sleep_forever()
        except BaseException:
            self.held.remove(plan)
            raise
        return "asked-1"

    async def unregister(self, plan: Plan) -> None: ...


def register_in(folder: Path, backend: Asked) -> list[object]:
    """One registration with a ledger; the type of its result or error, and how many plans the backend holds."""
    try:
        outcome: object = run_sync(lambda: register(hybrid(), backend, Settings(observers=[Ledger(folder, "i")])))
    except BaseException as error:  # noqa: BLE001 - a signal's handler raises what is not an Exception
        outcome = error
    return [type(outcome).__name__, len(backend.held)]


def worker(folder: Path, do: Callable[[int], None], *, handler: Any = None, waits: bool = True, forks: bool = False) -> dict[str, Any]:
    """A worker process to which `do` is done once it waits for its backend; how it ended."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        with suppress(BaseException):
            if handler is not None:
                signal.signal(signal.SIGTERM, handler)
            _work(folder, writing, waits=waits, forks=forks)
            os._exit(0)
        os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as lines:
        assert lines.readline() == "asked\n"
        do(pid)
        said = [json.loads(line) for line in lines]
    status = os.waitpid(pid, 0)[1]
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1
    return {"signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, "code": code, "said": said, "runs": runs(folder)}


def _work(folder: Path, said: int, *, waits: bool, forks: bool) -> None:
    children: list[int] = []

    def fork() -> None:
        children.append(os.fork())
        if not children[0]:
            outcome = register_in(folder.with_name(f"{folder.name}, the child"), Asked(lambda: None, waits=False))
            os._exit(0 if outcome == ["Receipt", 1] else 1)

    def asked() -> None:
        if forks:
            beside = Thread(target=fork)  # another thread of the engine, while this one registers
            beside.start()
            beside.join()
        os.write(said, b"asked\n")

    outcome = register_in(folder, Asked(asked, waits))
    os.write(said, (json.dumps(outcome) + "\n").encode())
    for child in children:
        os.write(said, (json.dumps(["child", os.waitpid(child, 0)[1]]) + "\n").encode())


def runs(folder: Path) -> dict[str, float]:
    """The runs that a ledger counts, by outcome."""
    lines = (folder / "kvreg-i-0.prom").read_text().splitlines()
    counted = [line for line in lines if line.startswith("kvreg_runs_total{")]
    return {line.split('outcome="')[1].split('"')[0]: float(line.rpartition(" ")[2]) for line in counted}


def stop(number: int, frame: object) -> None:
    """A signal handler as engines have one."""
    raise SystemExit


def main(folder: Path) -> None:
    """Every disturbance, one after the other."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started with it ignored
    run_sync(lambda: register(hybrid(), Asked(lambda: None, waits=False)))  # what a first registration imports is there before the forks
    nothing: Callable[[int], None] = lambda pid: None  # noqa: E731
    ended = {
        "terminated, handled": worker(folder / "handled", lambda pid: os.kill(pid, signal.SIGTERM), handler=stop),
        "interrupted": worker(folder / "interrupted", lambda pid: os.kill(pid, signal.SIGINT)),
        "terminated": worker(folder / "terminated", lambda pid: os.kill(pid, signal.SIGTERM)),
        "after terminated": worker(folder / "terminated", nothing, waits=False),
        "killed": worker(folder / "killed", lambda pid: os.kill(pid, signal.SIGKILL)),
        "after killed": worker(folder / "killed", nothing, waits=False),
        "forked": worker(folder / "forked", nothing, waits=False, forks=True),
    }
    ended["forked, the child"] = {"signal": 0, "code": 0, "said": [], "runs": runs(folder / "forked, the child")}
    print(json.dumps(ended))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
