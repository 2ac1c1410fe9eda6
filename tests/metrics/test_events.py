"""Events: one line each, with names an operator can search, whose run it is, and nothing that must not be logged."""

import asyncio
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
import structlog
import torch
from hypothesis import given
from hypothesis import strategies as st
from structlog.contextvars import bind_contextvars, clear_contextvars, get_contextvars

from metrics.events import EVENTS, FIELDS, RUN_FIELDS, EventObserver, event_logger
from metrics.observer import Outcome, Run, StageResult
from orchestrator.logs import set_up_logs
from orchestrator.pipeline import Settings, register
from stages.errors import Reason, RegistrationRejected, Rejection, Stage, TransferRefused, TransferUnavailable
from stages.model import Receipt
from tests.metrics.watched import Accepting, Lines, run, run_cancelled, run_together
from tests.offers import hybrid

RUN = Run("run-1", "model", "worker", "0")


@pytest.fixture
def written() -> Iterator[Lines]:
    """The lines that reach a handler of the logger "kvreg"."""
    logger, lines = logging.getLogger("kvreg"), Lines()
    level = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(lines)
    logger.setLevel(level)
    clear_contextvars()


def events(written: Lines) -> list[dict[str, Any]]:
    """The lines as JSON documents."""
    return [json.loads(line) for line in written.lines]


def apart() -> tuple[logging.Logger, Lines]:
    """A logger of no hierarchy, and its lines."""
    logger, lines = logging.Logger("apart"), Lines()  # noqa: LOG001 - getLogger would share it between tests
    logger.addHandler(lines)
    return logger, lines


def test_a_registration_is_told_from_start_to_end(written: Lines) -> None:
    """Which stages ran, how long, what they made, which rule edited what, and that it is registered."""
    receipt = run(hybrid(rank=3), [EventObserver()])
    assert isinstance(receipt, Receipt)
    told = events(written)
    assert [(event["event"], event.get("stage")) for event in told] == [
        ("registration.started", None),
        ("registration.stage.finished", "validate"),
        ("registration.stage.finished", "edit"),
        ("kv_group.edited", "edit"),
        ("kv_group.edited", "edit"),
        ("registration.stage.finished", "engine-group-info"),
        ("registration.stage.finished", "transfer-register"),
        ("registration.finished", None),
    ]
    edited = [
        (event["group"], event["rule"], event["layers"], event["layer_names"]) for event in told if event["event"] == "kv_group.edited"
    ]
    assert edited == [
        (0, "mamba-unified-view", 2, ["l.0.state", "l.1.state"]),
        (1, "subpaged-attention-view", 2, ["l.0.attn", "l.1.attn"]),
    ]
    end = told[-1]
    assert (end["groups"], end["layers"], end["backend"], end["level"]) == (2, 4, "accepting", "info")
    assert end["registered_bytes"] == receipt.plan.registered_bytes
    assert all(event["duration_s"] >= 0 for event in told if event["event"] == "registration.stage.finished")


def test_a_refusal_is_told_with_its_facts(written: Lines) -> None:
    """Stage, group, layers, reason and numbers of each refusal, as errors, then the end with all reasons."""
    run(hybrid(mode="none"), [EventObserver()])
    *_, refused, end = events(written)
    assert (refused["event"], refused["level"]) == ("kv_group.rejected", "error")
    assert (refused["stage"], refused["rule"], refused["group"], refused["reason"]) == ("validate", None, 0, "mamba_cache_mode")
    assert (refused["layers"], refused["layer_names"], refused["facts"]) == (2, ["l.0.state", "l.1.state"], {"mode": "none"})
    assert (end["event"], end["rejections"], end["reasons"]) == ("registration.rejected", 1, ["mamba_cache_mode"])


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TransferRefused(Reason.TRANSFER_REFUSED, {}), ("TransferRefused", False, ["transfer_refused"])),
        (TransferUnavailable(Reason.TRANSFER_TIMEOUT, {}), ("TransferUnavailable", True, ["transfer_timeout"])),
        (ZeroDivisionError("bug"), ("ZeroDivisionError", False, [])),
    ],
)
def test_a_failure_says_its_type_and_whether_trying_again_helps(
    written: Lines, error: Exception, expected: tuple[str, bool, list[str]]
) -> None:
    """The operator sees a backend that is away apart from one that says no, and both apart from a bug."""
    with pytest.raises(type(error)):
        raise run(hybrid(), [EventObserver()], Accepting(lambda: error))  # type: ignore[misc]
    end = events(written)[-1]
    assert end["event"] == "registration.failed"
    assert (end["error_type"], end["retryable"], end["reasons"]) == expected


def test_a_cancelled_run_is_told(written: Lines) -> None:
    """A shutdown during a registration is a warning."""
    run_cancelled(hybrid(), [EventObserver()])
    assert [(event["event"], event["level"]) for event in events(written)][-1] == ("registration.cancelled", "warning")


def test_recovery_and_bypass_are_told(written: Lines) -> None:
    """A plan sent again, well or not, and an engine that serves on without it."""
    observer = EventObserver()
    observer.recovered(RUN, Outcome.REGISTERED)
    observer.recovered(RUN, Outcome.REJECTED)
    observer.bypassed(RUN, RegistrationRejected((Rejection(Stage.VALIDATE, Reason.CHUNK_SIZE),)))
    told = [(event["event"], event["level"], event.get("outcome"), event.get("reasons")) for event in events(written)]
    assert told == [
        ("registration.recovered", "info", "registered", None),
        ("registration.recovered", "error", "rejected", None),
        ("registration.bypassed", "error", None, ["chunk_size"]),
    ]


def test_every_event_says_whose_it_is(written: Lines) -> None:
    """Four workers at once, one refused: each line names its run, model, role and worker, and the runs do not mix."""
    run_together([hybrid(rank=rank, mode="none" if rank == 2 else "align") for rank in range(4)], [EventObserver()])
    told = events(written)
    assert {event["event"] for event in told} <= set(EVENTS)
    assert all(set(RUN_FIELDS) <= set(event) <= FIELDS for event in told)
    assert len({(event["run_id"], event["worker_id"]) for event in told}) == 4
    ends = {event["worker_id"]: event["event"] for event in told}
    assert ends == {
        "0": "registration.finished",
        "1": "registration.finished",
        "2": "registration.rejected",
        "3": "registration.finished",
    }


def test_an_event_is_one_line_on_a_console_too() -> None:
    """Who reads logs in a terminal gets the same facts without JSON, and without colour codes in the file."""
    logger, lines = apart()
    run(hybrid(mode="none"), [EventObserver(event_logger(logger, as_json=False))])
    assert [len(line.splitlines()) for line in lines.lines] == [1] * len(lines.lines)
    assert "kv_group.rejected" in lines.lines[-2]
    assert "reason=mamba_cache_mode" in lines.lines[-2]
    assert "\x1b" not in "".join(lines.lines)


def test_events_below_the_loggers_level_are_not_made(written: Lines) -> None:
    """An application that wants errors only says so to the standard library, as for any library."""
    logging.getLogger("kvreg").setLevel(logging.ERROR)
    run(hybrid(), [EventObserver()])
    run(hybrid(mode="none"), [EventObserver()])
    assert {event["event"] for event in events(written)} == {"kv_group.rejected", "registration.rejected"}


HOSTILE = 'm"\n{"event": "registration.finished"}\r\x1b[2J\u2028\udc80'


@pytest.mark.parametrize("as_json", [True, False])
def test_a_hostile_model_name_forges_no_line(as_json: bool) -> None:
    """A name with newlines, terminal codes or quotes is one value of one line, escaped, and of limited length."""
    logger, lines = apart()
    run(replace(hybrid(), model_name=HOSTILE + "x" * 100_000), [EventObserver(event_logger(logger, as_json=as_json))])
    for line in lines.lines:
        assert len(line.splitlines()) == 1
        assert all(letter.isprintable() for letter in line)
        assert len(line) < 2000


def test_words_of_a_server_and_what_others_bound_are_not_logged(written: Lines) -> None:
    """A token in a backend's answer, or one that the application bound to its own log context, is in no line."""
    bind_contextvars(api_key="token-abc", request={"authorization": "token-abc"})
    answer = TransferRefused(
        Reason.TRANSFER_REFUSED, {"words": "401 for token-abc", "url": "tcp://u:token-abc@h", "status": 401, "layout": "NHD"}
    )
    run(hybrid(), [EventObserver()], Accepting(lambda: answer))
    assert "token-abc" not in "\n".join(written.lines)
    assert events(written)[-2]["facts"] == {"status": 401, "layout": "NHD"}


def test_tensors_are_not_logged(written: Lines) -> None:
    """Whatever is passed as a field, only numbers, names and collections of these come out."""
    log = event_logger()
    log.info("registration.started", layers=torch.arange(3), facts={"shape": (1, 2), "view": torch.ones(2)}, file=b"bytes", group=object())
    (event,) = events(written)
    assert (event["layers"], event["facts"], event["file"], event["group"]) == (None, {"shape": [1, 2], "view": None}, None, None)


@given(st.text(), st.text(), st.dictionaries(st.text(), st.one_of(st.text(), st.floats(), st.integers(), st.none(), st.tuples(st.text()))))
def test_any_refusal_is_one_line_of_json(model_name: str, layer: str, facts: dict[str, Any]) -> None:
    """No layer name, model name or fact breaks the line or its JSON."""
    logger, lines = apart()
    observer = EventObserver(event_logger(logger))
    rejection = Rejection(Stage.EDIT, Reason.WIDTH, "rule", 1, (layer,), facts)
    told = Run("run", model_name, "worker", "0")
    observer.started(told)
    observer.finished(told, Outcome.REJECTED, RegistrationRejected((rejection,)))
    assert [json.loads(line, parse_constant=pytest.fail)["event"] for line in lines.lines] == [
        "registration.started",
        "kv_group.rejected",
        "registration.rejected",
    ]


class Elsewhere:
    """An observer that looks at the log context from a thread and a task started within the run."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def started(self, run: Run) -> None: ...

    def stage_finished(self, run: Run, stage: Stage, duration_s: float, result: StageResult) -> None:
        if stage is Stage.VALIDATE:
            self.seen.append(get_contextvars())
            thread = threading.Thread(target=copy_context().run, args=(lambda: self.seen.append(get_contextvars()),))
            thread.start()
            thread.join()

    def finished(self, run: Run, outcome: Outcome, cause: BaseException | None) -> None: ...

    def recovered(self, run: Run, outcome: Outcome) -> None: ...

    def bypassed(self, run: Run, cause: BaseException) -> None: ...


class FromThread(Accepting):
    """A backend that works in a thread and in a task."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    async def register(self, plan: object) -> str:
        self.seen.append(await anyio.to_thread.run_sync(get_contextvars))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.look)
        return "plan-1"

    async def look(self) -> None:
        self.seen.append(get_contextvars())


def test_threads_and_tasks_of_a_run_know_whose_they_are() -> None:
    """What a backend logs from its own thread or task names the run; after the run nothing is left bound."""
    elsewhere, backend = Elsewhere(), FromThread()

    async def main() -> dict[str, Any]:
        observers = (EventObserver(event_logger(apart()[0])), elsewhere)
        await asyncio.gather(*(register(hybrid(rank=rank), backend, Settings(observers=observers)) for rank in range(2)))
        await register(hybrid(rank=2), backend, Settings(observers=observers))
        return get_contextvars()

    left = asyncio.run(main())
    assert left == {}
    assert sorted(seen["worker_id"] for seen in elsewhere.seen) == ["0", "0", "1", "1", "2", "2"]
    assert sorted(seen["worker_id"] for seen in backend.seen) == ["0", "0", "1", "1", "2", "2"]
    assert all(set(seen) == set(RUN_FIELDS) for seen in elsewhere.seen + backend.seen)
    assert len({seen["run_id"] for seen in backend.seen}) == 3


def test_a_configured_structlog_stays_configured() -> None:
    """The application's own structlog settings neither change ours nor are changed by us."""
    before = structlog.get_config()
    try:
        structlog.configure(
            processors=[lambda *_: pytest.fail("the application's processor was used")], wrapper_class=structlog.BoundLogger
        )
        configured = structlog.get_config()
        run(hybrid(), [EventObserver()])
        assert structlog.get_config() == configured
    finally:
        structlog.configure(**before)


def test_set_up_writes_every_record_of_kvreg_as_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody set logging up, events and kvreg's other log lines go to the stream once, each naming its run."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logger = logging.getLogger("kvreg")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    set_up_logs()
    set_up_logs()
    observer = EventObserver()
    observer.started(RUN)
    try:
        raise RuntimeError("token-abc")
    except RuntimeError:
        logging.getLogger("kvreg.observers").exception("observer %s failed", "X")
    observer.finished(RUN, Outcome.REGISTERED, None)
    lines = capsys.readouterr().err.splitlines()
    assert "token-abc" not in "".join(lines)
    first, foreign, last = map(json.loads, lines)
    assert (first["event"], last["event"]) == ("registration.started", "registration.finished")
    assert (foreign["event"], foreign["logger"], foreign["level"]) == ("observer X failed", "kvreg.observers", "error")
    assert (foreign["run_id"], foreign["error_type"]) == ("run-1", "RuntimeError")
    assert "test_events.py:" in foreign["at"]


def test_set_up_leaves_an_applications_logging_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the application has a handler, kvreg adds none, and its level is the application's."""
    logger, lines = logging.getLogger("kvreg"), Lines()
    monkeypatch.setattr(logging.getLogger(), "handlers", [lines])
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.WARNING)
    set_up_logs()
    run(hybrid(mode="none"), [EventObserver()])
    assert logger.handlers == []
    assert [event["event"] for event in events(lines)] == ["kv_group.rejected", "registration.rejected"]


IMPORT = """
import logging, structlog
before = (logging.getLogger().handlers[:], logging.getLogger().level, logging.getLogger("kvreg").handlers[:], structlog.is_configured())
import metrics.events, metrics.ledger, metrics.prometheus, orchestrator.logs, orchestrator.plugin
after = (logging.getLogger().handlers[:], logging.getLogger().level, logging.getLogger("kvreg").handlers[:], structlog.is_configured())
assert before == after, (before, after)
from prometheus_client import REGISTRY
assert not [name for name in REGISTRY._names_to_collectors if name.startswith("kvreg")]
"""


def test_importing_changes_nothing_global() -> None:
    """Log handlers, levels, structlog's configuration and the default registry are the application's."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run([sys.executable, "-W", "error", "-c", IMPORT], env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
