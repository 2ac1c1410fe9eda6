"""What an observer of a registration is told, and how it is kept from changing the outcome."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

from stages.errors import Stage
from stages.model import Edited, Plan, Receipt, Validated

StageResult: TypeAlias = Validated | Edited | Plan | Receipt

_log = logging.getLogger("kvreg.observers")


class Outcome(StrEnum):
    """How a run ended."""

    REGISTERED = "registered"
    REJECTED = "rejected"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Run:
    """One registration of one worker, as every event and metric names it."""

    run_id: str
    model_name: str
    role: str
    worker_id: str


class Observer(Protocol):
    """Told of a run as it happens. What it raises is logged and changes nothing."""

    def started(self, run: Run) -> None:
        """The run begins."""

    def stage_finished(self, run: Run, stage: Stage, duration_s: float, result: StageResult) -> None:
        """A stage returned `result` after `duration_s` seconds."""

    def finished(self, run: Run, outcome: Outcome, cause: BaseException | None) -> None:
        """The run ended; `cause` is what it raises, None if it registered."""

    def recovered(self, run: Run, outcome: Outcome) -> None:
        """A server that had forgotten the run's plan was sent it again: REGISTERED, FAILED (to be tried again) or REJECTED (given up)."""

    def bypassed(self, run: Run, cause: BaseException) -> None:
        """The engine serves without the external cache from now on, because of `cause`."""


def tell(observers: Iterable[Observer], call: Callable[[Observer], None]) -> None:
    """Call each observer; one that fails is logged, and the others and the run go on."""
    for observer in observers:
        try:
            call(observer)
        except Exception:  # noqa: BLE001 - whatever an observer raises is its own affair
            _log.exception("observer %s failed; the registration is not affected", type(observer).__name__)
