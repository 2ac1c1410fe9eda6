"""The dashboard shows something: every panel's query, asked of a live Prometheus that reads real ledgers."""

import json
import math
import re
from typing import Any

import pytest

from tests.observability.chain import DEPLOY
from tests.observability.conftest import Watched

pytestmark = pytest.mark.observability

DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "kvreg.json").read_text())
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"] if panel["type"] != "row"}


def asked(query: str) -> str:
    """A query as Grafana sends it with every variable at All."""
    query = query.replace("$namespace", ".*").replace("$model", ".*")
    assert "$" not in query
    return query


def numbers(row: dict[str, Any]) -> list[float]:
    """The values of a row, of an instant or a range."""
    return [float(value) for _, value in (row["values"] if "values" in row else [row["value"]])]


@pytest.mark.parametrize("title", PANELS)
def test_a_panel_shows_numbers(title: str, watched: Watched) -> None:
    """I open the dashboard after refusals, and no panel says "No data"."""
    [target] = PANELS[title]["targets"]
    rows = (
        watched.chain.query_range(asked(target["expr"]), seconds=120, step_s=15)
        if target["range"]
        else watched.chain.query(asked(target["expr"]))
    )
    assert any(math.isfinite(number) for row in rows for number in numbers(row)), f"no data: {target['expr']}"


def test_the_panels_say_what_happened(watched: Watched) -> None:
    """Two workers registered two groups each, nine were refused, one failed and one is bypassed: the panels agree."""
    shown = {title: watched.chain.query(asked(panel["targets"][0]["expr"])) for title, panel in PANELS.items()}
    single = {title: numbers(rows[0]) for title, rows in shown.items() if PANELS[title]["type"] == "stat"}
    assert single["Workers registered"] == [2]
    assert single["Workers refused in 15 minutes"] == [8 + 1 + 1]
    assert single["Workers bypassed"] == [1]
    assert single["Layers registered"] == [2 * 4]
    reasons = {(row["metric"]["model_name"], row["metric"]["reason"]): numbers(row) for row in shown["Refusals by reason"]}
    assert reasons == {
        ("refused", "mamba_cache_mode"): [8],
        ("bypassing", "mamba_cache_mode"): [1],
        ("failing", "transfer_refused"): [1],
    }


def test_the_variables_list_what_can_be_chosen(watched: Watched) -> None:
    """The model variable offers every model that has a ledger."""
    [variable] = [variable for variable in DASHBOARD["templating"]["list"] if variable["name"] == "model"]
    listed = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
    assert listed
    rows = watched.chain.query(f"group by ({listed[2]}) ({listed[1]})")
    assert {row["metric"]["model_name"] for row in rows} == {"steady", "failing", "bypassing", "refused"}
