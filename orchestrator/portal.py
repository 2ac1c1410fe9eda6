"""The one synchronous entry: vLLM calls a connector from a thread that must block until the registration is done.

That thread usually runs no event loop; where it does (a notebook, an async test), the registration runs in a thread of
its own, because a running loop cannot be re-entered. The caller's CUDA device is current wherever the work runs: it is
a property of a thread, and a stage that touched another device would register the wrong memory.
"""

from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Literal, TypeVar

import anyio
import torch

Result = TypeVar("Result")
Loop = Literal["asyncio", "trio"]


def run_sync(work: Callable[[], Awaitable[Result]], loop: Loop = "asyncio") -> Result:
    """Run `work()` to its end on an event loop of its own and return its result or raise its error.

    Context variables of the caller are seen by the work.
    """
    if not _loop_is_running():
        return _run(work, loop)
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    context = copy_context()
    with ThreadPoolExecutor(1, thread_name_prefix="kvreg") as thread:
        return thread.submit(context.run, _run_on_device, work, loop, device).result()


def _run_on_device(work: Callable[[], Awaitable[Result]], loop: Loop, device: int | None) -> Result:
    if device is not None:
        torch.cuda.set_device(device)
    return _run(work, loop)


def _run(work: Callable[[], Awaitable[Result]], loop: Loop) -> Result:
    """The result goes beside the loop's own: on the main thread asyncio prints a task's result twice, and a receipt is long."""
    results: list[Result] = []

    async def keep() -> None:
        results.append(await work())

    anyio.run(keep, backend=loop)
    return results[0]


def _loop_is_running() -> bool:
    try:
        anyio.current_time()
    except RuntimeError:  # anyio's NoEventLoopError
        return False
    return True
