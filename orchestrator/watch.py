"""One run under observation: its stages timed, its end told, whatever that end is."""

import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TypeVar

from anyio.lowlevel import checkpoint

from metrics.observer import Observer, Outcome, Run, StageResult, tell
from stages.errors import RegistrationRejected, Stage

Result = TypeVar("Result", bound=StageResult)


class Watch:
    """`async with Watch(run, observers) as watch:` tells the observers when the run starts, what each stage returns, and how it ends."""

    def __init__(self, run: Run, observers: Sequence[Observer]) -> None:
        self.run = run
        self.observers = observers

    async def __aenter__(self) -> "Watch":
        tell(self.observers, lambda observer: observer.started(self.run))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, cause: BaseException | None, trace: TracebackType | None) -> None:
        outcome = _outcome(cause)
        tell(self.observers, lambda observer: observer.finished(self.run, outcome, cause))

    async def stage(self, stage: Stage, work: Callable[[], Result]) -> Result:
        """Run a stage that only computes, after a chance to be cancelled."""
        await checkpoint()
        begin = time.perf_counter()
        result = work()
        self._finished(stage, begin, result)
        return result

    async def waiting_stage(self, stage: Stage, work: Awaitable[Result]) -> Result:
        """Run a stage that waits."""
        begin = time.perf_counter()
        result = await work
        self._finished(stage, begin, result)
        return result

    def _finished(self, stage: Stage, begin: float, result: StageResult) -> None:
        duration_s = time.perf_counter() - begin
        tell(self.observers, lambda observer: observer.stage_finished(self.run, stage, duration_s, result))


def _outcome(cause: BaseException | None) -> Outcome:
    if cause is None:
        return Outcome.REGISTERED
    if isinstance(cause, RegistrationRejected):
        return Outcome.REJECTED
    # What is no Exception is a loop's cancellation, or the engine being stopped (SystemExit, KeyboardInterrupt): nothing failed.
    return Outcome.FAILED if isinstance(cause, Exception) else Outcome.CANCELLED
