"""One chain for all tests that look at it: engines that registered, were refused, failed and are bypassed."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.observability.chain import Chain, eventually

SCRAPED_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Watched:
    """A running chain, and when the eight refused workers of the engine "refused" began."""

    chain: Chain
    refused_at: float


@pytest.fixture(scope="session")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """The chain, after the workers of four engines were started and killed, and their ledgers were read."""
    with Chain(tmp_path_factory.mktemp("observability") / "chain") as chain:
        refused_at = chain.work("steady:registered:2", "failing:failed:1", "bypassing:bypassed:1", "refused:rejected:8")
        eventually(lambda: chain.query('kvreg_runs_total{model_name="refused", worker_id="7", outcome="rejected"} == 1'), SCRAPED_TIMEOUT_S)
        eventually(lambda: chain.query('ALERTS{alertname="KVRegWatchdog"}'), SCRAPED_TIMEOUT_S)
        yield Watched(chain, refused_at)
