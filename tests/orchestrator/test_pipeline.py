"""The pipeline: one worker, many workers, failures, cancellation, and observers that cannot change an outcome."""

from collections.abc import Callable

import anyio
import pytest

from metrics.observer import Outcome, Run, StageResult
from orchestrator.backend.embedded import EmbeddedBackend
from orchestrator.pipeline import Settings, register, register_all
from stages.errors import Reason, RegistrationRejected, Stage, TransferRefused, TransferUnavailable
from stages.model import Plan, Receipt
from tests.offers import hybrid

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Every test here runs on both event loops."""
    return str(request.param)


class Recorder:
    """An observer that keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def started(self, run: Run) -> None:
        self.told.append(("started", run))

    def stage_finished(self, run: Run, stage: Stage, duration_s: float, result: StageResult) -> None:
        assert duration_s >= 0
        self.told.append((stage, type(result).__name__))

    def finished(self, run: Run, outcome: Outcome, cause: BaseException | None) -> None:
        self.told.append((outcome, type(cause).__name__ if cause else None))


class Broken:
    """An observer that always fails."""

    def started(self, run: Run) -> None:
        raise OSError("disk full")

    def stage_finished(self, run: Run, stage: Stage, duration_s: float, result: StageResult) -> None:
        raise OSError("disk full")

    def finished(self, run: Run, outcome: Outcome, cause: BaseException | None) -> None:
        raise OSError("disk full")


class Waiting:
    """A backend that never answers; `entered` is set once it is asked, `held` is what it would have kept."""

    name = "waiting"

    def __init__(self) -> None:
        self.entered = anyio.Event()
        self.held: list[Plan] = []

    async def register(self, plan: Plan) -> str:
        self.held.append(plan)
        self.entered.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.held.remove(plan)
        raise AssertionError("sleep_forever returned")

    async def unregister(self, plan: Plan) -> None: ...


class Failing:
    """A backend that answers with an error."""

    name = "failing"

    def __init__(self, error: Callable[[], Exception]) -> None:
        self.error = error

    async def register(self, plan: Plan) -> str:
        raise self.error()

    async def unregister(self, plan: Plan) -> None: ...


async def test_observers_see_each_arrow_and_the_end() -> None:
    """Start, four stages with the value each returned, registered: in that order."""
    recorder = Recorder()
    receipt = await register(hybrid(rank=3), EmbeddedBackend(), Settings(observers=[recorder], role="worker"))
    assert isinstance(receipt, Receipt)
    (_, run), *stages = recorder.told
    assert (run.model_name, run.role, run.worker_id) == ("hybrid", "worker", "3")
    assert stages == [
        (Stage.VALIDATE, "Validated"),
        (Stage.EDIT, "Edited"),
        (Stage.ENGINE_GROUP_INFO, "Plan"),
        (Stage.TRANSFER_REGISTER, "Receipt"),
        (Outcome.REGISTERED, None),
    ]


async def test_a_failing_observer_changes_nothing_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The run registers, the observer after the broken one is still told, and the log has the cause."""
    recorder = Recorder()
    await register(hybrid(), EmbeddedBackend(), Settings(observers=[Broken(), recorder]))
    assert recorder.told[-1] == (Outcome.REGISTERED, None)
    assert "Broken" in caplog.text
    assert "disk full" in caplog.text


async def test_a_failing_observer_does_not_hide_a_refusal() -> None:
    """What the caller sees is the refusal, not the observer's error."""
    with pytest.raises(RegistrationRejected):
        await register(hybrid(mode="none"), EmbeddedBackend(), Settings(observers=[Broken()]))


async def test_each_of_many_workers_has_its_own_outcome() -> None:
    """Eight workers at once; one is refused, one's backend fails, six register."""
    shared = EmbeddedBackend()
    offers = {f"worker {rank}": hybrid(rank=rank, mode="none" if rank == 2 else "align") for rank in range(8)}
    refusing = Failing(lambda: TransferRefused(Reason.TRANSFER_REFUSED, {}))
    backends = {name: refusing if name == "worker 5" else shared for name in offers}
    recorder = Recorder()
    outcomes = await register_all(offers, backends, Settings(observers=[recorder]))
    assert list(outcomes) == list(offers)
    kinds = [type(outcome).__name__ for outcome in outcomes.values()]
    assert kinds == ["Receipt", "Receipt", "RegistrationRejected", "Receipt", "Receipt", "TransferRefused", "Receipt", "Receipt"]
    ends = [told[0] for told in recorder.told if isinstance(told[0], Outcome)]
    assert sorted(ends) == sorted([Outcome.REGISTERED] * 6 + [Outcome.REJECTED, Outcome.FAILED])


async def test_a_backend_that_never_answers_is_given_up_after_the_limit() -> None:
    """The failure is typed, retryable, names the limit, and leaves nothing registered."""
    backend, recorder = Waiting(), Recorder()
    with pytest.raises(TransferUnavailable, match=r"0\.01 s") as failed:
        await register(hybrid(), backend, Settings(observers=[recorder], register_timeout_s=0.01))
    assert failed.value.reason is Reason.TRANSFER_TIMEOUT
    assert failed.value.retryable
    assert isinstance(failed.value.__cause__, TimeoutError)
    assert backend.held == []
    assert recorder.told[-1] == (Outcome.FAILED, "TransferUnavailable")


async def test_cancelling_leaves_nothing_registered() -> None:
    """A shutdown while the backend is asked: the run ends as cancelled, and the backend holds nothing."""
    backend, recorder = Waiting(), Recorder()
    async with anyio.create_task_group() as workers:
        workers.start_soon(register, hybrid(), backend, Settings(observers=[recorder]))
        await backend.entered.wait()
        workers.cancel_scope.cancel()
    assert backend.held == []
    assert recorder.told[-1][0] is Outcome.CANCELLED


async def test_a_foreign_error_is_not_swallowed() -> None:
    """A backend's bug surfaces as it is, and is counted as failed."""
    recorder = Recorder()
    with pytest.raises(ZeroDivisionError):
        await register(hybrid(), Failing(lambda: ZeroDivisionError("bug")), Settings(observers=[recorder]))
    assert recorder.told[-1] == (Outcome.FAILED, "ZeroDivisionError")
