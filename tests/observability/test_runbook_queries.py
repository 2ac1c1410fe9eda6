"""The queries in the runbooks are ones that Prometheus answers."""

import re

import pytest

from tests.deploy.sources import RUNBOOKS
from tests.observability.conftest import Watched

pytestmark = pytest.mark.observability

QUERIES = sorted(
    {query for text in RUNBOOKS.values() for query in re.findall(r"promtool query instant \$PROMETHEUS '(.+)'$", text, re.MULTILINE)}
)
EMPTY_WHILE_ALL_IS_WELL = {
    'up{job="kvreg-ledger"} == 0',
    'node_textfile_scrape_error{job="kvreg-ledger"} == 1',
    'time() - kvreg_run_last_started_timestamp_seconds{job="kvreg-ledger"} > 600',
    'changes(kvreg_rule_rejections_total{job="kvreg-ledger"}[1h]) >= 1',
    'count by (namespace, model_name) ({__name__="vllm:num_requests_running"})',
}
"""What a first refusal, healthy exporters and a chain without engines have no rows for."""


def test_there_are_queries_and_the_exceptions_are_among_them() -> None:
    """The list of queries is not empty, and every exception is a query."""
    assert set(QUERIES) > EMPTY_WHILE_ALL_IS_WELL


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_of_a_runbook_is_answered(query: str, watched: Watched) -> None:
    """At night I paste the line from the runbook, and it answers with rows."""
    rows = watched.chain.query(query)
    assert rows or query in EMPTY_WHILE_ALL_IS_WELL
