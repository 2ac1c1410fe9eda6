"""The waits between requests that a server has not answered."""

from itertools import islice
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.backend.retries import SPREAD, limits_s


@pytest.mark.parametrize(("chance", "factor"), [(0.0, 1 - SPREAD), (0.5, 1.0), (1.0, 1 + SPREAD)])
def test_a_wait_doubles_until_the_longest(chance: float, factor: float) -> None:
    """5, 10, 20, 40 and 40 seconds, each a quarter shorter or longer at most."""
    assert list(islice(limits_s(5, 40, lambda: chance), 5)) == [limit * factor for limit in (5, 10, 20, 40, 40)]


@given(st.integers(0, 2**32))
def test_workers_that_ask_together_do_not_ask_again_together(seed: int) -> None:
    """Two workers that draw for themselves wait differently long."""
    one, other = (list(islice(limits_s(5, 40, Random(seed + worker).random), 4)) for worker in range(2))
    assert all(left != right for left, right in zip(one, other, strict=True))
