"""A server restart, as a worker's heartbeat meets it."""

from collections.abc import Callable

import anyio
import pytest

from metrics.observer import Outcome, Run, StageResult
from orchestrator.recovery import Recovery
from stages.errors import Reason, Stage, TransferRefused, TransferUnavailable

RUN = Run("run", "model", "worker", "0")


class Seen:
    """An observer that keeps the outcomes of recoveries."""

    def __init__(self) -> None:
        self.recoveries: list[Outcome] = []

    def started(self, run: Run) -> None: ...

    def stage_finished(self, run: Run, stage: Stage, duration_s: float, result: StageResult) -> None: ...

    def finished(self, run: Run, outcome: Outcome, cause: BaseException | None) -> None: ...

    def recovered(self, run: Run, outcome: Outcome) -> None:
        assert run is RUN
        self.recoveries.append(outcome)

    def bypassed(self, run: Run, cause: BaseException) -> None: ...


class Server:
    """A server that answers each re-sending with the next of its answers."""

    def __init__(self, *answers: Callable[[], None]) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def resend(self) -> None:
        self.asked += 1
        self.answers.pop(0)()


def acknowledges() -> None: ...


def is_not_there() -> None:
    raise TransferUnavailable(Reason.TRANSFER_UNREACHABLE, {})


def refuses() -> None:
    raise TransferRefused(Reason.TRANSFER_REFUSED, {"said": "another model is here"})


def breaks() -> None:
    raise ZeroDivisionError


def test_a_server_that_is_not_ready_is_tried_again_and_each_try_counts() -> None:
    """The server comes back slowly; the worker keeps trying, and I see how often."""
    server, seen = Server(is_not_there, is_not_there, acknowledges), Seen()
    recovery = Recovery(server.resend, RUN, [seen], 60)
    assert [recovery(), recovery(), recovery()] == [False, False, True]
    assert seen.recoveries == [Outcome.FAILED, Outcome.FAILED, Outcome.REGISTERED]


def test_the_next_restart_is_recovered_from_too() -> None:
    """The server restarts twice, and the worker is back twice."""
    server, seen = Server(acknowledges, acknowledges), Seen()
    recovery = Recovery(server.resend, RUN, [seen], 60)
    assert [recovery(), recovery()] == [True, True]
    assert seen.recoveries == [Outcome.REGISTERED] * 2


@pytest.mark.parametrize("error", [refuses, breaks])
def test_a_final_error_ends_it_with_a_word_in_the_log(error: Callable[[], None], caplog: pytest.LogCaptureFixture) -> None:
    """The new server says no: the worker says so once and does not ask for ever."""
    server, seen = Server(error), Seen()
    recovery = Recovery(server.resend, RUN, [seen], 60)
    assert [recovery(), recovery(), recovery()] == [False, False, False]
    assert server.asked == 1
    assert seen.recoveries == [Outcome.REJECTED]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "given up" in caplog.text


def test_a_server_that_never_answers_does_not_hold_the_heartbeat_for_ever() -> None:
    """A server that takes the plan and says nothing costs one try its time limit."""

    async def silent() -> None:
        await anyio.sleep_forever()

    seen = Seen()
    assert Recovery(silent, RUN, [seen], 0.05)() is False
    assert seen.recoveries == [Outcome.FAILED]
