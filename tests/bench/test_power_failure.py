"""The simulated fleet, where its outcome can be worked out by hand."""

import random
from collections.abc import Callable, Iterator
from itertools import repeat

import pytest

from bench.power_failure import BOOT_S, SERVER_UP_S, TAKES_S, Policy, serve


def every(wait_s: float) -> Callable[[Callable[[], float]], Iterator[float]]:
    """Waits that are all alike."""
    return lambda chance: repeat(wait_s)


def test_a_worker_alone_is_registered_when_its_server_is_up_and_has_taken_both_requests() -> None:
    """Nobody else is in the queue, and no wait is over before the answer."""
    outcome = serve(Policy("patient", (every(100), every(100))), 1, random.Random(0))
    assert outcome.registered_s == pytest.approx(SERVER_UP_S + sum(TAKES_S))
    assert (outcome.given_up, outcome.requests, outcome.burst) == (0, 2, 2)


@pytest.mark.parametrize("workers", [2, 50])
def test_a_fleet_of_patient_workers_is_done_when_each_has_been_taken_once(workers: int) -> None:
    """All of them asked before the server was up, so that it is never idle."""
    outcome = serve(Policy("patient", (every(100), every(100))), workers, random.Random(0))
    assert outcome.registered_s == pytest.approx(SERVER_UP_S + workers * sum(TAKES_S))
    assert (outcome.given_up, outcome.requests) == (0, 2 * workers)


def test_a_worker_that_hears_only_the_last_answer_gives_up_where_the_queue_is_longer_than_its_patience() -> None:
    """The server works all the time, and for nothing; with every answer counted all are registered."""
    workers = round(3 * BOOT_S / sum(TAKES_S))
    waits = (every(BOOT_S), every(BOOT_S))
    assert serve(Policy("last", waits, any_answer=False), workers, random.Random(0)).given_up > workers / 2
    assert serve(Policy("any", waits), workers, random.Random(0)).given_up == 0
