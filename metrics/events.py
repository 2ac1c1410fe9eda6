"""A registration as a log: short past facts with fields, one structured line each.

A library's logging: events go through the standard library's logger "kvreg" and its handlers, whatever the application
set up; structlog is never configured globally, and importing this module changes nothing outside it.
"""

import logging
import math
import time
from collections.abc import Mapping
from contextvars import Token
from typing import Any, TypeAlias

import structlog
from structlog.contextvars import bind_contextvars, merge_contextvars, reset_contextvars
from structlog.stdlib import BoundLogger
from structlog.typing import EventDict, Processor, WrappedLogger

from metrics.observer import Outcome, Run, StageResult
from metrics.tally import rejections_of
from stages.errors import Fact, Rejection, Stage, TransferError
from stages.model import Edited, Plan, Receipt

Plain: TypeAlias = str | int | float | bool | None

LOGGER_NAME = "kvreg"

EVENTS = (
    "registration.started",
    "registration.stage.finished",
    "kv_group.edited",
    "kv_group.rejected",
    "registration.finished",
    "registration.rejected",
    "registration.failed",
    "registration.cancelled",
    "registration.recovered",
    "registration.bypassed",
    "ledger.resumed",
    "ledger.write_failed",
)
"""Every event there is."""

RUN_FIELDS = ("run_id", "model_name", "role", "worker_id")
"""What every event says first."""

FIELDS = frozenset(
    {
        *RUN_FIELDS,
        *("event", "level", "logger", "timestamp", "at"),
        *("stage", "rule", "group", "reason", "reasons", "facts", "outcome", "backend", "retryable", "error_type", "error_code"),
        *("layers", "layer_names", "groups", "excluded", "opaque", "rejections", "registered_bytes", "duration_s"),
        *("file", "series", "dropped_series"),
    }
)
"""The only fields an event can have; any other is dropped, whoever bound it."""

NAMED_FACTS = frozenset({"backend", "layout", "known", "served", "kind", "mode", "shape", "stride"})
"""Facts whose words are names of ours or of the engine. Another fact's words (a server's answer, say) stay in the error."""

_NAME_CHARACTERS = 256
_EVENT_CHARACTERS = 4096
_NAMED_LAYERS = 8
_NAMED_VALUES = 64


def event_logger(logger: logging.Logger | None = None, *, as_json: bool = True) -> BoundLogger:
    """A structlog logger that renders each event to one line, JSON or for a console, and hands it to `logger`, by default "kvreg"."""
    bound: BoundLogger = structlog.wrap_logger(
        logger or logging.getLogger(LOGGER_NAME),
        processors=[structlog.stdlib.filter_by_level, *line_processors(), renderer(as_json=as_json)],
        wrapper_class=BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=False,
    ).bind()
    return bound


def renderer(*, as_json: bool) -> Processor:
    """What makes one line of an event: JSON, or words for a console, without colours."""
    return structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=False)


def line_processors() -> tuple[Processor, ...]:
    """What every line passes before it is rendered: the run's identity, level, time, and only fields on the list."""
    return (
        merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        only_listed_fields,
    )


def only_listed_fields(_logger: WrappedLogger, _method: str, event_dict: EventDict) -> EventDict:
    """Keep the fields of `FIELDS`, as numbers and one-line names; event and identity first."""
    first = [name for name in RUN_FIELDS if name in event_dict]
    rest = [name for name in event_dict if name in FIELDS and name not in {"event", *first}]
    said = {"event": _name(str(event_dict["event"]), _EVENT_CHARACTERS)} if "event" in event_dict else {}
    return {**said, **{name: _plain(event_dict[name]) for name in (*first, *rest)}}


class EventObserver:
    """Logs every run it is told of; with no `logger`, as JSON lines through the standard library's logger "kvreg".

    From start to end of a run its identity is also bound to the context, so that whatever else logs through structlog
    in the run's task, in tasks and threads started from it, can say whose line it is.
    """

    def __init__(self, logger: BoundLogger | None = None) -> None:
        self._log = logger or event_logger()
        self._begun: dict[str, tuple[float, Mapping[str, Token[Any]]]] = {}
        self._receipts: dict[str, Receipt] = {}

    def started(self, run: Run) -> None:
        """Bind the run's identity, and say that it begins."""
        self._begun[run.run_id] = (time.perf_counter(), bind_contextvars(**run_fields(run)))
        self._log.info("registration.started", **run_fields(run))

    def stage_finished(self, run: Run, stage: Stage, duration_s: float, result: StageResult) -> None:
        """Say what the stage made, and for edited layers which rule edited how many of which group."""
        self._log.info("registration.stage.finished", **run_fields(run), stage=stage.value, duration_s=duration_s, **_made(result))
        if isinstance(result, Edited):
            for (group, rule), names in result.applied.items():
                fields = {"group": group, "rule": rule, **_layers(names)}
                self._log.info("kv_group.edited", **run_fields(run), stage=stage.value, **fields)
        if isinstance(result, Receipt):
            self._receipts[run.run_id] = result

    def finished(self, run: Run, outcome: Outcome, cause: BaseException | None) -> None:
        """Unbind the run's identity, and say what was refused and how the run ended."""
        begin, tokens = self._begun.pop(run.run_id, (time.perf_counter(), {}))
        _unbind(tokens)
        receipt = self._receipts.pop(run.run_id, None)
        fields: dict[str, object] = {**run_fields(run), "duration_s": time.perf_counter() - begin}
        rejections = rejections_of(cause)
        for rejection in rejections:
            self._log.error("kv_group.rejected", **run_fields(run), **_refused(rejection))
        if outcome is Outcome.REGISTERED:
            self._log.info("registration.finished", **fields, **(_made(receipt) if receipt else {}))
        elif outcome is Outcome.REJECTED:
            self._log.error("registration.rejected", **fields, rejections=len(rejections), reasons=_reasons(rejections))
        elif outcome is Outcome.CANCELLED:
            self._log.warning("registration.cancelled", **fields)
        else:
            retryable = isinstance(cause, TransferError) and cause.retryable
            failed = {"error_type": type(cause).__name__, "retryable": retryable, "reasons": _reasons(rejections)}
            self._log.error("registration.failed", **fields, **failed)

    def recovered(self, run: Run, outcome: Outcome) -> None:
        """Say that a plan was sent again after the backend lost it, and how that ended."""
        say = self._log.info if outcome is Outcome.REGISTERED else self._log.error
        say("registration.recovered", **run_fields(run), outcome=outcome.value)

    def bypassed(self, run: Run, cause: BaseException) -> None:
        """Say that the engine serves on without the external cache, and what for."""
        self._log.error("registration.bypassed", **run_fields(run), error_type=type(cause).__name__, reasons=_reasons(rejections_of(cause)))


def run_fields(run: Run) -> dict[str, str]:
    """A run's identity as fields."""
    return {"run_id": run.run_id, "model_name": run.model_name, "role": run.role, "worker_id": run.worker_id}


def _unbind(tokens: Mapping[str, Token[Any]]) -> None:
    try:
        reset_contextvars(**tokens)
    except ValueError:
        # The run ended in another context than it began in: that context's own values are not ours to change.
        return


def _made(result: StageResult) -> dict[str, object]:
    """What a stage's result amounts to, in numbers and names."""
    if isinstance(result, Receipt):
        return {"backend": result.backend, **_made(result.plan), "registered_bytes": result.plan.registered_bytes}
    if isinstance(result, Plan):
        return {"groups": len(result.groups), "layers": len(result.layers), "excluded": len(result.excluded)}
    return {"layers": len(result.layers), "excluded": len(result.excluded)}


def _refused(rejection: Rejection) -> dict[str, object]:
    return {
        "stage": rejection.stage.value,
        "rule": rejection.rule,
        "group": rejection.group,
        "reason": rejection.reason.value,
        **_layers(rejection.layer_names),
        "facts": {name: value for name, value in rejection.facts.items() if name in NAMED_FACTS or _numeric(value)},
    }


def _layers(names: tuple[str, ...]) -> dict[str, object]:
    return {"layers": len(names), "layer_names": names[:_NAMED_LAYERS]}


def _reasons(rejections: tuple[Rejection, ...]) -> list[str]:
    return sorted({rejection.reason.value for rejection in rejections})


def _numeric(value: Fact) -> bool:
    return all(map(_numeric, value)) if isinstance(value, tuple) else not isinstance(value, str)


def _plain(value: object) -> Plain | list[Any] | dict[str, Any]:
    """Numbers as they are, text as one printable line of limited length, sequences and mappings of these; else nothing."""
    if isinstance(value, str):
        return _name(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value[:_NAMED_VALUES]]
    if isinstance(value, Mapping):
        return {_name(str(name)): _plain(item) for name, item in list(value.items())[:_NAMED_VALUES]}
    return None


def _name(text: str, limit: int = _NAME_CHARACTERS) -> str:
    """One printable line: what would break the line, colour a terminal or not encode is escaped."""
    shown = text[:limit]
    if shown.isprintable():
        return shown
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape", "backslashreplace").decode() for letter in shown)
