"""What is made from something else is up to date, and the dashboard is one that Grafana's own model reads."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from tests.deploy.sources import DEPLOY, ROOT


def run(monkeypatch: pytest.MonkeyPatch, script: Path, *arguments: str) -> str | None:
    """Run a script of deploy/; returns what it exits with."""
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return str(end.code)
    return None


def test_every_made_file_is_what_its_source_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody edited a copy of the rules, the dashboard, the reasons or the metrics, or forgot to make it again."""
    assert run(monkeypatch, DEPLOY / "build.py", "--check") is None
    assert run(monkeypatch, DEPLOY / "grafana" / "dashboard.py", "--check") is None


def test_an_edited_copy_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If somebody changes a copy by hand, the check names it; making the files again mends it."""
    for folder in ("deploy", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    build = tmp_path / "deploy" / "build.py"
    copy = tmp_path / "deploy" / "helm" / "kvreg" / "files" / "kvreg.rules.yml"
    copy.write_text(copy.read_text().replace("< 900", "< 901"))
    told = run(monkeypatch, build, "--check")
    assert told
    assert "deploy/helm/kvreg/files/kvreg.rules.yml differ" in told
    assert run(monkeypatch, build) is None
    assert run(monkeypatch, build, "--check") is None


def test_the_dashboard_fills_its_grid_without_overlap() -> None:
    """No panel lies on another, none is wider than the page, and each says what to make of it."""
    panels = json.loads((DEPLOY / "grafana" / "dashboards" / "kvreg.json").read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["type"] == "row" or panel["description"]
    assert len({panel["id"] for panel in panels}) == len(panels)


@pytest.mark.observability
def test_grafanas_own_model_reads_the_dashboard_whole() -> None:
    """Decoded and encoded by Grafana's published types, the dashboard is the same: no field is unknown to them."""
    pytest.importorskip("grafana_foundation_sdk", reason="pip install kvreg[deploy]")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    written = json.loads((DEPLOY / "grafana" / "dashboards" / "kvreg.json").read_text())
    read = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(written)))
    assert _without(written, read) == []


def _without(written: object, read: object, place: str = "") -> list[str]:
    """Where `read` lacks or changes something that was written; what a type adds by default is no loss."""
    if isinstance(written, dict) and isinstance(read, dict):
        return [loss for key, value in written.items() for loss in _without(value, read.get(key), f"{place}/{key}")]
    if isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        return [loss for at, value in enumerate(written) for loss in _without(value, read[at], f"{place}/{at}")]
    return [] if written == read else [f"{place}: {written!r} became {read!r}"]
