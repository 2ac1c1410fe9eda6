"""The termination log: why the container died, in the place where Kubernetes looks, and nowhere else."""

from pathlib import Path

import pytest

from metrics.observer import Outcome, Run
from metrics.termination import LIMIT_BYTES, TerminationLog
from stages.errors import Reason, RegistrationRejected, TransferRefused
from tests.metrics.watched import Accepting, run, run_cancelled
from tests.offers import hybrid

RUN = Run("r", "m", "worker", "0")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """An empty termination log, as the kubelet makes it."""
    path = tmp_path / "termination-log"
    path.touch()
    return path


def test_a_refusal_is_one_line_with_reason_and_way_out(log: Path) -> None:
    """`kubectl describe pod` shows the error's own line."""
    refused = run(hybrid(mode="none"), [TerminationLog(log)])
    assert isinstance(refused, RegistrationRejected)
    assert log.read_text() == f"{refused}\n"
    assert "mamba_cache_mode" in log.read_text()


def test_a_failed_transfer_is_written_too(log: Path) -> None:
    """A backend that said no ends the engine as well."""
    failed = run(hybrid(), [TerminationLog(log)], Accepting(lambda: TransferRefused(Reason.TRANSFER_REFUSED, {"words": "a\nb"})))
    assert log.read_text() == f"{failed}\n"
    assert len(log.read_text().splitlines()) == 1


def test_nothing_is_written_for_a_run_that_ends_otherwise(log: Path) -> None:
    """A registration and a shutdown leave no reason to die of."""
    run(hybrid(), [TerminationLog(log)])
    run_cancelled(hybrid(), [TerminationLog(log)])
    assert log.read_text() == ""


def test_the_file_is_never_created(tmp_path: Path) -> None:
    """Outside Kubernetes nothing appears."""
    run(hybrid(mode="none"), [TerminationLog(tmp_path / "termination-log")])
    assert list(tmp_path.iterdir()) == []


def test_workers_of_one_container_say_the_same_once(log: Path) -> None:
    """Eight workers refused for one cause are one line; another cause has its own."""
    for rank in range(8):
        run(hybrid(rank=rank, mode="none"), [TerminationLog(log)])
    run(hybrid(mode="x"), [TerminationLog(log)])
    first, second = log.read_text().splitlines()
    assert "mode=none" in first
    assert "mode=x" in second


def test_no_more_is_written_than_is_read(log: Path) -> None:
    """Kubernetes reads 4096 bytes: the first reasons stay whole, however many follow."""
    for size in range(3000, 3003):
        TerminationLog(log).finished(RUN, Outcome.FAILED, RuntimeError("x" * size))
    assert log.stat().st_size == LIMIT_BYTES
    assert log.read_text().splitlines()[0] == "x" * 3000


def test_an_engine_that_serves_on_takes_its_reason_back(log: Path) -> None:
    """With the bypass the engine lives; what it dies of later is not this. Another worker's reason stays."""
    log.write_text("another worker's reason\n")
    termination = TerminationLog(log)
    run(hybrid(mode="none"), [termination])
    assert len(log.read_text().splitlines()) == 2
    termination.bypassed(RUN, RuntimeError())
    assert log.read_text() == "another worker's reason\n"


def test_a_log_that_cannot_be_written_changes_no_outcome(tmp_path: Path) -> None:
    """The refusal is raised as it is."""
    assert isinstance(run(hybrid(mode="none"), [TerminationLog(tmp_path)]), RegistrationRejected)
