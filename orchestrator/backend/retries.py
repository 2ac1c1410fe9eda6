"""How long a worker waits for a server's answer before it asks again. Numbers only: the benchmark of a fleet draws from it, too."""

import random
from collections.abc import Callable, Iterator

SPREAD = 0.25


def limits_s(first_s: float, longest_s: float, chance: Callable[[], float] = random.random) -> Iterator[float]:
    """Seconds to wait after the first request, after the second, and so on: doubled each time up to `longest_s`, ±25 %.

    Doubled, because a server that has not answered may have a queue, and each further request makes it longer; uneven,
    because workers that lost one server ask the next one together.
    """
    limit_s = first_s
    while True:
        yield limit_s * (1 + SPREAD * (2 * chance() - 1))
        limit_s = min(2 * limit_s, longest_s)
