"""Counts on their way to another process: whole after the journey, added up there, and sent once."""

import json
import pickle

from metrics.counts import CountsObserver, Payload, entries, merged
from metrics.observer import Outcome, Run
from tests.metrics.watched import run
from tests.offers import hybrid

RUN = Run("r", "m", "worker", "0")


def test_what_was_counted_is_sent_once() -> None:
    """A second look without a new run has nothing, so nothing is counted twice."""
    counts = CountsObserver()
    run(hybrid(), [counts])
    assert counts.drain()["kvreg_runs_total"] == [(["hybrid", "worker", "0", "registered"], 1.0)]
    assert counts.drain() == {}


def test_counts_survive_json_and_pickle() -> None:
    """Whatever carries them between the engine's processes, they mean the same after it."""
    counts = CountsObserver()
    run(hybrid(mode="none"), [counts])
    payload = counts.drain()
    expected = list(entries(payload))
    assert len(expected) > 5
    assert list(entries(json.loads(json.dumps(payload)))) == expected
    assert list(entries(pickle.loads(pickle.dumps(payload)))) == expected


def test_counts_of_two_workers_add_up_without_mixing() -> None:
    """Counters and durations of the same worker add up, the newest gauge stays, and another worker's are its own."""
    first, second, other = CountsObserver(clock=lambda: 1.0), CountsObserver(clock=lambda: 2.0), CountsObserver()
    run(hybrid(), [first])
    run(hybrid(), [second])
    run(hybrid(rank=1), [other])
    together = {
        (metric.name, labels): value for metric, labels, value in entries(merged(merged(first.drain(), second.drain()), other.drain()))
    }
    assert together["kvreg_runs_total", ("hybrid", "worker", "0", "registered")] == 2
    assert together["kvreg_runs_total", ("hybrid", "worker", "1", "registered")] == 1
    assert together["kvreg_run_last_started_timestamp_seconds", ("hybrid", "worker", "0")] == 2.0
    durations = together["kvreg_stage_duration_seconds", ("hybrid", "worker", "0", "edit")]
    assert isinstance(durations, list)
    assert len(durations) == 2


def test_metrics_of_another_release_are_left_out() -> None:
    """An API server of an older kvreg meets a name it does not know and goes on."""
    payload: Payload = {"kvreg_future_total": [(["m", "worker", "0"], 1.0)], "kvreg_bypassed": [(["m", "worker", "0"], 1.0)]}
    assert [metric.name for metric, _, _ in entries(payload)] == ["kvreg_bypassed"]


def test_nothing_is_sent_for_series_at_zero() -> None:
    """A step's statistics stay small: hundreds of series exist, only those that something happened to travel."""
    counts = CountsObserver()
    counts.started(RUN)
    counts.finished(RUN, Outcome.CANCELLED, None)
    assert sum(map(len, counts.drain().values())) < 10
