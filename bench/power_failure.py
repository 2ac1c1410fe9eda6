"""A simulated fleet after a power failure: every worker registers at once, with servers that take registrations one by one.

Nothing is timed: virtual seconds, seeds fixed. What is driven is the delay code that kvreg ships (`retries.limits_s`), with
the numbers that `orchestrator/backend/lmcache.py` gives it.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TypeAlias

from bench.measure import Section, Spread
from orchestrator.backend.retries import limits_s

WORKERS, SEEDS = 10_000, (1, 2, 3)
SERVERS = (1250, 100, 10)
TAKES_S = (0.001, 0.05)
"""What a server spends on the question for its chunk size, by which a worker waits for it, and then on a registration."""

BOOT_S, SERVER_UP_S, GIVEN_UP_S = 10.0, 20.0, 300.0
"""Workers ask within the first; no server answers before the second; a worker gives up on either request after the third."""


Waits: TypeAlias = Callable[[Callable[[], float]], Iterator[float]]
"""Seconds until a worker sends a request again, time after time, from draws between 0 and 1."""


@dataclass(frozen=True)
class Policy:
    """The waits of the two requests, and whether the answer to an earlier one counts."""

    name: str
    waits: tuple[Waits, Waits]
    any_answer: bool = True


@dataclass(frozen=True)
class Outcome:
    """One fleet's end: when the last worker was registered, how many were not, requests sent, the most in one second to a server."""

    registered_s: float
    given_up: int
    requests: int
    burst: int


def policies() -> tuple[Policy, ...]:
    """The one that is shipped, first, and naive ones."""
    # Imported when it runs, for the numbers: it imports LMCache.
    from orchestrator.backend.lmcache import ASK_FIRST_S, ASK_LONGEST_S, REGISTER_FIRST_S, REGISTER_LONGEST_S

    shipped = (partial(limits_s, ASK_FIRST_S, ASK_LONGEST_S), partial(limits_s, REGISTER_FIRST_S, REGISTER_LONGEST_S))
    every_5_s = (partial(_every, 5.0), partial(_every, 5.0))
    return (
        Policy("kvreg: doubled, uneven", shipped),
        Policy("the same, only the last answer counts", shipped, any_answer=False),
        Policy("every 5 s ± 20 %", every_5_s),
        Policy("the same, only the last answer counts", every_5_s, any_answer=False),
        Policy("every second ± 20 %", (partial(_every, 1.0), partial(_every, 1.0))),
    )


def _every(wait_s: float, chance: Callable[[], float]) -> Iterator[float]:
    while True:
        yield wait_s * (0.8 + 0.4 * chance())


def run() -> Section:
    """Every policy against every division of the fleet."""
    rows = []
    for servers in SERVERS:
        least_s = SERVER_UP_S + WORKERS / servers * sum(TAKES_S)
        for policy in policies():
            outcomes = [fleet(policy, servers, seed) for seed in SEEDS]
            last = Spread.of(outcome.registered_s for outcome in outcomes)
            given_up = Spread.of(outcome.given_up for outcome in outcomes).middle
            again = Spread.of(outcome.requests / WORKERS - len(TAKES_S) for outcome in outcomes)
            burst = Spread.of(outcome.burst for outcome in outcomes).middle
            until = f"{last:.1f}" if not given_up else f"never: {given_up:,.0f} gave up"
            rows.append((f"{servers:,}", policy.name, until, f"{least_s:.1f}", f"{again:.2f}", f"{burst:,.0f}"))
    return Section(
        "After a power failure",
        f"Simulated, seeds {', '.join(map(str, SEEDS))}: {WORKERS:,} workers come up within {BOOT_S:.0f} s and their servers after\n"
        f"{SERVER_UP_S:.0f} s. A server takes requests in the order of arrival: {TAKES_S[0] * 1e3:.0f} ms for the question by which a\n"
        f"worker waits for it, then {TAKES_S[1] * 1e3:.0f} ms for a registration, also for one that it holds already. What was sent\n"
        f"before it is up reaches it then. A worker gives up after {GIVEN_UP_S:.0f} s. `docs/scale.md` says what to read from it.",
        (
            "servers",
            "asks again",
            "all registered after, s",
            "at the earliest, s",
            "requests sent again, each worker",
            "most in 1 s at one server",
        ),
        rows,
        "Times count from the power's return.",
    )


def fleet(policy: Policy, servers: int, seed: int) -> Outcome:
    """All servers of a fleet, each with its own workers: they do not meet."""
    chance = random.Random(seed)
    outcomes = [serve(policy, WORKERS // servers, chance) for _ in range(servers)]
    return Outcome(
        max(outcome.registered_s for outcome in outcomes),
        sum(outcome.given_up for outcome in outcomes),
        sum(outcome.requests for outcome in outcomes),
        max(outcome.burst for outcome in outcomes),
    )


def serve(policy: Policy, workers: int, chance: random.Random) -> Outcome:
    """One server and its workers. It is a queue, so that when a request arrives it is known when it will be answered."""
    free_s = SERVER_UP_S
    began_s = [chance.uniform(0, BOOT_S) for _ in range(workers)]
    waits = [policy.waits[0](chance.random) for _ in range(workers)]
    request, answered_s = [0] * workers, [inf] * workers
    given_up = requests = 0
    arrived: Counter[int] = Counter()
    awake = [(begin_s, worker) for worker, begin_s in enumerate(began_s)]
    heapq.heapify(awake)
    now_s = 0.0
    while awake:
        now_s, worker = heapq.heappop(awake)
        if answered_s[worker] <= now_s:
            request[worker] += 1
            if request[worker] == len(TAKES_S):
                continue
            began_s[worker], answered_s[worker], waits[worker] = now_s, inf, policy.waits[request[worker]](chance.random)
        elif now_s >= began_s[worker] + GIVEN_UP_S:
            given_up += 1
            continue
        requests += 1
        arrived[int(max(now_s, SERVER_UP_S))] += 1
        free_s = max(free_s, now_s) + TAKES_S[request[worker]]
        again_s = min(now_s + next(waits[worker]), began_s[worker] + GIVEN_UP_S)
        if policy.any_answer or free_s <= again_s:
            answered_s[worker] = min(answered_s[worker], free_s)
        heapq.heappush(awake, (min(answered_s[worker], again_s), worker))
    return Outcome(now_s, given_up, requests, max(arrived.values()))
