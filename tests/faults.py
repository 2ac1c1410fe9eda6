"""What tests do to a registration, and what they look at afterwards."""

import os
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from types import coroutine
from typing import Any

import anyio


@coroutine
def interrupted(work: Awaitable[object], at: int, scope: anyio.CancelScope) -> Generator[Any, Any, None]:
    """Await `work`, and cancel `scope` when it waits for the `at`-th time."""
    steps, wait, waits = work.__await__(), None, 0
    resume: Callable[[], Any] = lambda: steps.send(None)  # type: ignore[attr-defined]  # noqa: E731 - what goes on next
    while True:
        try:
            wait = resume()
        except StopIteration:
            return
        waits += 1
        if waits == at:
            scope.cancel()
        try:
            answer = yield wait
            resume = lambda answer=answer: steps.send(answer)  # noqa: E731
        except BaseException as thrown:  # noqa: BLE001 - the loop's cancellation, on its way into the work
            resume = lambda thrown=thrown: steps.throw(thrown)  # noqa: E731


def held(pid: int) -> dict[str, list[str]]:
    """What a process holds that outlives its objects: threads, file descriptors, shared memory that it has made or mapped."""
    process = Path(f"/proc/{pid}")
    mapped = {line.split()[-1] for line in (process / "maps").read_text().splitlines() if "/dev/shm/" in line}
    made = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if f"_{pid}_" in name}
    return {
        "threads": sorted((task / "comm").read_text().strip() for task in (process / "task").iterdir()),
        "descriptors": sorted(os.readlink(file).split(":")[0] for file in (process / "fd").iterdir() if os.path.lexists(file)),
        "shared memory": sorted(made | mapped),
    }
