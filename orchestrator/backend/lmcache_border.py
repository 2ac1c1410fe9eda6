"""The border to LMCache: what it raises becomes ours, and what it answers is waited for without holding a thread."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import anyio
from lmcache.v1.multiprocess.futures import MessagingFuture

from stages.errors import Fact, KVRegError, Reason, TransferRefused, TransferUnavailable

_POLL_S = 0.02


async def answered(answer: MessagingFuture[Any], timeout_s: float, check: Callable[[], None] = lambda: None) -> bool:
    """Whether an answer is there within `timeout_s` seconds; waits without holding a thread, so that it can be cancelled."""
    return await first_answered([answer], timeout_s, check) is not None


async def first_answered(
    answers: Sequence[MessagingFuture[Any]], timeout_s: float, check: Callable[[], None] = lambda: None
) -> MessagingFuture[Any] | None:
    """The first of some answers that is there, or None after `timeout_s` seconds. Waits as `answered` does."""
    with anyio.move_on_after(timeout_s):
        while not any(answer.query() for answer in answers):
            check()
            await anyio.sleep(_POLL_S)
    return next((answer for answer in answers if answer.query()), None)


def foreign(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call LMCache; what it raises becomes ours."""
    try:
        return call(*arguments)
    except KVRegError:
        raise
    except Exception as cause:  # noqa: BLE001 - the border: whatever LMCache raises becomes ours
        _translate(cause)


def _translate(cause: Exception) -> NoReturn:
    """A foreign error as ours: worth another try only where nothing was reached or nothing answered."""
    facts: dict[str, Fact] = {"backend": "lmcache", "said": f"{type(cause).__name__}: {cause}"}
    if isinstance(cause, ConnectionError | TimeoutError):
        raise TransferUnavailable(Reason.TRANSFER_UNREACHABLE, facts) from cause
    raise TransferRefused(Reason.TRANSFER_REFUSED, facts) from cause
