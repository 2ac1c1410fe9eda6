"""The synchronous entry, from threads with and without a running event loop."""

import asyncio
import threading
from contextvars import ContextVar

import pytest
import trio
from anyio.lowlevel import checkpoint

from orchestrator.portal import Loop, run_sync

COLOUR: ContextVar[str] = ContextVar("COLOUR", default="none")


async def where() -> tuple[str, str, str]:
    """Loop, thread and context of the work."""
    await checkpoint()
    loop = "trio" if trio.lowlevel.in_trio_run() else "asyncio"
    return loop, threading.current_thread().name, COLOUR.get()


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_without_a_loop_the_work_runs_in_the_callers_thread(loop: Loop) -> None:
    """vLLM's worker thread: its CUDA device is current because it is its own."""
    token = COLOUR.set("red")
    try:
        assert run_sync(where, loop) == (loop, threading.current_thread().name, "red")
    finally:
        COLOUR.reset(token)


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
@pytest.mark.parametrize("outer", ["asyncio", "trio"])
def test_under_a_running_loop_the_work_has_a_thread_of_its_own(outer: str, loop: Loop) -> None:
    """A notebook or async test: no re-entry, and the caller's context variables are seen."""

    async def caller() -> tuple[str, str, str]:
        COLOUR.set("blue")
        return run_sync(where, loop)

    ran_in, thread, colour = asyncio.run(caller()) if outer == "asyncio" else trio.run(caller)
    assert (ran_in, colour) == (loop, "blue")
    assert thread != threading.current_thread().name


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_a_result_is_not_printed(loop: Loop) -> None:
    """A receipt of a thousand layers is a megabyte of text, which asyncio's signal handling would make twice for nobody to read."""

    class Unprintable:
        def __repr__(self) -> str:
            raise AssertionError("printed")

    async def work() -> Unprintable:
        return result

    result = Unprintable()
    assert run_sync(work, loop) is result


@pytest.mark.parametrize("nested", [False, True])
def test_an_error_comes_out_as_it_is(nested: bool) -> None:
    """The caller sees the work's own exception, whichever thread it ran in."""

    async def fails() -> None:
        raise LookupError("gone")

    async def caller() -> None:
        run_sync(fails)

    with pytest.raises(LookupError, match="gone"):
        asyncio.run(caller()) if nested else run_sync(fails)


def test_many_threads_may_register_at_once() -> None:
    """Each thread has a loop of its own."""
    results: list[tuple[str, str, str]] = []
    threads = [threading.Thread(target=lambda: results.append(run_sync(where))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({name for _, name, _ in results}) == 8
