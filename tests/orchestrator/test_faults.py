"""Faults on the path of a registration: whatever happens in the middle of it, it is registered and said so, or it is not."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from metrics.ledger import Ledger
from metrics.observer import Outcome, Run, StageResult
from orchestrator.pipeline import Settings, register
from orchestrator.portal import Loop, run_sync
from stages.errors import Reason, RegistrationRejected, Stage, TransferUnavailable
from stages.model import Plan, Receipt
from tests.faults import interrupted
from tests.offers import hybrid
from tests.orchestrator import cycles

ROOT = Path(__file__).parents[2]
SMALLEST_PIECE_BYTES = 32
"""What glibc's allocator takes for any object, however small."""


class Slow:
    """A backend that registers in several steps, each of which waits; `held` is what it keeps."""

    name = "slow"

    def __init__(self) -> None:
        self.held: list[Plan] = []

    async def register(self, plan: Plan) -> str:
        await checkpoint()
        self.held.append(plan)
        try:
            await checkpoint()
            await checkpoint()
        except BaseException:
            self.held.remove(plan)
            raise
        return "slow-1"

    async def unregister(self, plan: Plan) -> None:
        self.held.remove(plan)


class Ends:
    """An observer that keeps how each run ended."""

    def __init__(self) -> None:
        self.of: list[Outcome] = []

    def started(self, run: Run) -> None: ...

    def stage_finished(self, run: Run, stage: Stage, duration_s: float, result: StageResult) -> None: ...

    def finished(self, run: Run, outcome: Outcome, cause: BaseException | None) -> None:
        self.of.append(outcome)

    def recovered(self, run: Run, outcome: Outcome) -> None: ...

    def bypassed(self, run: Run, cause: BaseException) -> None: ...


# ----------------------------------------------------------------------------------------------------------- cancellation


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_cancelling_at_any_await_leaves_nothing_registered(loop: Loop) -> None:
    """A shutdown at whichever moment: the run is told once as cancelled, nothing is held, and the next try registers."""
    backend, awaits = Slow(), 0
    while not backend.held:
        awaits += 1
        ends = Ends()

        async def cancelled(at: int = awaits, ends: Ends = ends) -> None:
            with anyio.CancelScope() as scope:
                await interrupted(register(hybrid(), backend, Settings(observers=[ends])), at, scope)

        run_sync(cancelled, loop)
        assert ends.of == [Outcome.REGISTERED if backend.held else Outcome.CANCELLED]
    assert awaits > 6, "three stages and three steps of the backend wait"


@pytest.mark.parametrize("cause", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("stage", list(Stage)[:-1])
def test_an_engine_that_is_stopped_between_stages_is_cancelled_and_not_failed(stage: Stage, cause: type[BaseException]) -> None:
    """A signal's handler raises wherever it strikes: the run ends there, and nobody is paged for a failed registration."""

    class Stopping(Ends):
        def stage_finished(self, run: Run, at: Stage, duration_s: float, result: StageResult) -> None:
            if at is stage:
                raise cause

    backend, stopping = Slow(), Stopping()
    with pytest.raises(cause):
        run_sync(lambda: register(hybrid(), backend, Settings(observers=[stopping])))
    assert (backend.held, stopping.of) == ([], [Outcome.CANCELLED])


# -------------------------------------------------------------------------------------------------------------- observers


@pytest.mark.parametrize("error", [OSError("disk full"), AssertionError("a bug"), StopIteration(), RecursionError("too deep")], ids=repr)
@pytest.mark.parametrize("method", ["started", "stage_finished", "finished"])
@pytest.mark.parametrize("outcome", list(Outcome))
def test_whatever_an_observer_raises_the_outcome_is_the_same(method: str, error: Exception, outcome: Outcome) -> None:
    """Registered, refused, failed or cancelled: each method of an observer may fail, and the caller and the others see no difference."""

    class Raising(Ends):
        def __getattribute__(self, name: str) -> Any:
            if name != method:
                return super().__getattribute__(name)

            def fail(*told: object) -> None:
                raise error

            return fail

    class Failing(Slow):
        async def register(self, plan: Plan) -> str:
            raise TransferUnavailable(Reason.TRANSFER_UNREACHABLE, {})

    before, after, backend = Ends(), Ends(), Failing() if outcome is Outcome.FAILED else Slow()
    settings = Settings(observers=[before, Raising(), after])
    offer = hybrid(mode="none" if outcome is Outcome.REJECTED else "align")

    async def run() -> str:
        with anyio.CancelScope() as scope:
            if outcome is Outcome.CANCELLED:
                scope.cancel()
            try:
                return type(await register(offer, backend, settings)).__name__
            except (RegistrationRejected, TransferUnavailable) as raised:
                return type(raised).__name__
        return "cancelled"

    names = {Outcome.REGISTERED: "Receipt", Outcome.REJECTED: "RegistrationRejected", Outcome.FAILED: "TransferUnavailable"}
    assert run_sync(run) == names.get(outcome, "cancelled")
    assert before.of == after.of == [outcome]
    assert bool(backend.held) == (outcome is Outcome.REGISTERED)


# ------------------------------------------------------------------------------------------------------------------ clocks


def test_a_clock_that_goes_backwards_changes_no_outcome_and_no_count(tmp_path: Path) -> None:
    """The host's time is set back an hour at every look: runs are counted, their series resume, and each time is what the clock said."""
    now = 1_000_000.0

    def backwards() -> float:
        nonlocal now
        now -= 3600
        return now

    ended: list[Receipt | RegistrationRejected] = []
    for mode in ("align", "none", "align"):
        ledger = Ledger(tmp_path, "i", clock=backwards)
        try:
            ended.append(run_sync(lambda mode=mode, ledger=ledger: register(hybrid(mode=mode), Slow(), Settings(observers=[ledger]))))
        except RegistrationRejected as refused:
            ended.append(refused)
        ledger.close()
    text = (tmp_path / "kvreg-i-0.prom").read_text()
    assert [type(end).__name__ for end in ended] == ["Receipt", "RegistrationRejected", "Receipt"]
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if not line.startswith("#")}
    runs = {key: value for key, value in values.items() if key.startswith("kvreg_runs_total")}
    assert sorted(runs.values()) == [0, 0, 1, 2]
    assert all(value >= 0 for value in values.values())
    (last,) = (value for key, value in values.items() if key.startswith("kvreg_run_last_started_timestamp_seconds"))
    assert now <= last < 1_000_000


# --------------------------------------------------------------------------------------------------------------- processes


@dataclass(frozen=True)
class Ended:
    """How a worker process ended: its wait status, what it said last, and its ledger's runs by outcome."""

    signal: int
    code: int
    said: list[Any]
    runs: Mapping[str, float]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ended]:
    """Worker processes that were disturbed while the backend was asked, each as `tests.orchestrator.disturbed` tells."""
    folder = tmp_path_factory.mktemp("disturbed")
    command = [sys.executable, "-W", "ignore", "-m", "tests.orchestrator.disturbed", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return {name: Ended(**ended) for name, ended in json.loads(done.stdout).items()}


def test_a_worker_that_is_terminated_counts_as_cancelled(processes: Mapping[str, Ended]) -> None:
    """SIGTERM as an engine handles it, by SystemExit: the worker ends at once, holds nothing, and is not counted as failed."""
    ended = processes["terminated, handled"]
    assert (ended.signal, ended.code, ended.said) == (0, 0, [["SystemExit", 0]])
    assert ended.runs == {"cancelled": 1, "failed": 0, "registered": 0, "rejected": 0}


def test_an_interrupted_worker_counts_as_cancelled(processes: Mapping[str, Ended]) -> None:
    """Control-C in the middle: the same."""
    ended = processes["interrupted"]
    assert (ended.signal, ended.code, ended.said) == (0, 0, [["KeyboardInterrupt", 0]])
    assert ended.runs == {"cancelled": 1, "failed": 0, "registered": 0, "rejected": 0}


@pytest.mark.parametrize("how", ["terminated", "killed"])
def test_a_worker_that_is_killed_leaves_a_ledger_that_the_next_one_goes_on_from(how: str, processes: Mapping[str, Ended]) -> None:
    """SIGTERM without a handler, or SIGKILL: the file is whole, nothing is counted for the dead, and the next worker registers."""
    ended, after = processes[how], processes[f"after {how}"]
    assert ended.signal == (signal.SIGTERM if how == "terminated" else signal.SIGKILL)
    assert set(ended.runs.values()) == {0}
    assert (after.code, after.said, after.runs["registered"]) == (0, [["Receipt", 1]], 1)


def test_a_fork_in_the_middle_registers_for_itself_and_leaves_its_parent_alone(processes: Mapping[str, Ended]) -> None:
    """Another thread forks meanwhile: parent and child both register, each with its own backend and ledger, and neither hangs."""
    parent, child = processes["forked"], processes["forked, the child"]
    assert (parent.code, parent.said) == (0, [["Receipt", 1], ["child", 0]])
    assert (child.said, child.runs["registered"]) == ([], 1)
    assert parent.runs == {"cancelled": 0, "failed": 0, "registered": 1, "rejected": 0}


# ------------------------------------------------------------------------------------------------------------------- leaks


def test_a_thousand_registrations_leave_nothing_behind(tmp_path: Path) -> None:
    """Sleep and wake for weeks: no thread, descriptor, segment, tensor or byte is left of registrations that were given up."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.orchestrator.cycles", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | cycles.ALLOCATOR, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    left = json.loads(done.stdout)
    assert left["after"] == left["before"]
    assert left["tensors"] == 0
    assert left["bytes"] < cycles.CYCLES * SMALLEST_PIECE_BYTES, "not one object for each cycle"
