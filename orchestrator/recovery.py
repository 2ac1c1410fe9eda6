"""What happens when the LMCache server restarts: the same frozen plan is sent again, counted, until an error is final.

LMCache's worker adapter notices a restart by its heartbeat and calls back from that thread, again and again until the
callback says the registration stands. While it does not, the adapter drops stores and retrieves and the engine
computes, so an engine outlives its server.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence

import anyio

from metrics.observer import Observer, Outcome, Run, tell
from orchestrator.portal import run_sync
from stages.errors import KVRegError, Reason, TransferUnavailable

_log = logging.getLogger("kvreg.recovery")


class Recovery:
    """Called by the heartbeat of one worker after its server came back. `resend` sends the worker's plan once more."""

    def __init__(self, resend: Callable[[], Awaitable[None]], run: Run, observers: Sequence[Observer], timeout_s: float) -> None:
        self._resend = resend
        self._run = run
        self._observers = observers
        self._timeout_s = timeout_s
        self._given_up = False

    def __call__(self) -> bool:
        """Whether the server holds the plan again. Never raises. After a final error always False, without another try."""
        if self._given_up:
            return False
        try:
            run_sync(self._within_limit)
        except KVRegError as error:
            self._given_up = not error.retryable
            if self._given_up:
                _log.error("kvreg: recovery given up, the engine goes on without the external cache: %s", error)
            else:
                _log.warning("kvreg: recovery failed, to be tried again at the next heartbeat: %s", error)
        except Exception:  # noqa: BLE001 - the heartbeat thread dies of an error, and with it every later recovery
            self._given_up = True
            _log.exception("kvreg: recovery given up after an error that kvreg does not know")
        else:
            self._tell(Outcome.REGISTERED)
            _log.warning("kvreg: the LMCache server is back and holds this worker's plan again")
            return True
        self._tell(Outcome.REJECTED if self._given_up else Outcome.FAILED)
        return False

    async def _within_limit(self) -> None:
        try:
            with anyio.fail_after(self._timeout_s):
                await self._resend()
        except TimeoutError as cause:
            raise TransferUnavailable(Reason.TRANSFER_TIMEOUT, {"timeout_s": self._timeout_s}) from cause

    def _tell(self, outcome: Outcome) -> None:
        tell(self._observers, lambda observer: observer.recovered(self._run, outcome))
