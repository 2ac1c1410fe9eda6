"""Real worker processes that die the moment they are refused: what they counted is there, every time."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.observability.ledger_workers import Workers, workers
from tests.observability.test_ledger_file import REFUSED, values

pytestmark = pytest.mark.observability

DEATHS = 200


@pytest.fixture(scope="module")
def forked() -> Iterator[Workers]:
    """Worker processes at will."""
    with workers() as running:
        yield running


def test_two_hundred_refusals_of_workers_that_were_killed_are_two_hundred(tmp_path: Path, forked: Workers) -> None:
    """SIGKILL 0 to 199 ms after the refusal: none is lost, none is counted twice, and the next worker goes on from it."""
    path = tmp_path / "kvreg-i-0.prom"
    for delay_ms in range(DEATHS):
        pid = forked.start(tmp_path)
        assert forked.outcome(pid) == {"outcome": "RegistrationRejected"}
        time.sleep(delay_ms / 1000)
        forked.kill(pid)
    assert values(path, "kvreg_rule_rejections_total", **REFUSED) == [DEATHS]
    assert values(path, "kvreg_runs_total", outcome="rejected") == [DEATHS]


def test_a_worker_killed_at_any_moment_leaves_a_whole_file(tmp_path: Path, forked: Workers) -> None:
    """SIGKILL before, during and after the writes: each time another reader finds every series, and no count goes back."""
    path = tmp_path / "kvreg-i-0.prom"
    first = forked.start(tmp_path)
    forked.outcome(first)
    forked.kill(first)
    series, counted = path.read_text().count("\n"), 1.0
    for delay_ms in range(0, 120, 2):
        pid = forked.start(tmp_path)
        time.sleep(delay_ms / 1000)
        forked.kill(pid)
        assert path.read_text().count("\n") == series
        (now,) = values(path, "kvreg_rule_rejections_total", **REFUSED)
        assert now in {counted, counted + 1}
        counted = now
    last = forked.start(tmp_path)
    forked.outcome(last)
    forked.kill(last)
    assert values(path, "kvreg_rule_rejections_total", **REFUSED) == [counted + 1]
