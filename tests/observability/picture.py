"""`python -m tests.observability.picture`: docs/dashboard.png, the dashboard's panels with live numbers.

Drawn by headless Chromium from what a running Prometheus answers to the panels' own queries. It is not a picture of
Grafana, and says so: it shows what is on the dashboard and where, not how Grafana draws it.
"""

import html
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.observability.chain import DEPLOY, ROOT, Chain, eventually

FILE = ROOT / "docs" / "dashboard.png"
WIDTH, CELL_HEIGHT, GAP = 1440, 34, 8
SHOWN_S, STEP_S = 150, 5
COLORS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#b877d9", "#f2495c", "#8ab8ff", "#96d98d")
HIDDEN = {"__name__", "job", "instance"}

STYLE = f"""
body {{ margin: 0; background: #111217; color: #ccccdc; font: 12px 'DejaVu Sans', sans-serif; width: {WIDTH}px; position: relative }}
.panel {{ position: absolute; background: #181b1f; border: 1px solid #2a2d33; border-radius: 3px; box-sizing: border-box;
  padding: 6px 10px; overflow: hidden }}
.row {{ position: absolute; font-size: 14px; font-weight: bold; padding: 8px 4px; box-sizing: border-box }}
h1 {{ font-size: 18px; margin: 0; padding: 10px 12px 2px }} h2 {{ font-size: 12px; margin: 0 0 6px }}
.note {{ padding: 0 12px; color: #9fa3ad }} .stat {{ font-size: 34px; text-align: center; padding-top: 14px }}
table {{ width: 100%; border-collapse: collapse; font-size: 11px }}
td, th {{ text-align: left; padding: 2px 6px 2px 0; white-space: nowrap }}
th {{ color: #6e9fff; font-weight: normal }} .bar {{ height: 16px; margin: 2px 0 7px }}
"""


def value(number: float, unit: str) -> str:
    """A number in Grafana's unit."""
    if unit == "dateTimeFromNow":
        return f"{time.time() - number / 1000:.0f} seconds ago"
    if unit == "s":
        return f"{number * 1000:.3g} ms" if number < 1 else f"{number:.3g} s"
    if unit == "bytes":
        return f"{number / 1024:.1f} KiB" if number < 1024**2 else f"{number / 1024**2:.1f} MiB"
    return f"{number:g}"


def legend(row: dict[str, Any], form: str) -> str:
    """A series' name by the panel's legend."""
    for label, text in row["metric"].items():
        form = form.replace("{{" + label + "}}", text)
    return form


def unit_of(panel: dict[str, Any]) -> str:
    """A panel's unit, of a table that of its values."""
    config = panel["fieldConfig"]
    return str(config["defaults"].get("unit") or config["overrides"][0]["properties"][0]["value"])


def drawn(panel: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """A panel's inside."""
    unit, form = unit_of(panel), panel["targets"][0]["legendFormat"]
    if panel["type"] == "timeseries":
        return _lines(rows, form, panel["gridPos"]["w"] * WIDTH // 24 - 40, panel["gridPos"]["h"] * CELL_HEIGHT - 80)
    numbers = [float(row["value"][1]) for row in rows]
    if panel["type"] == "stat":
        red = [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"] if step["color"] == "red"]
        color = "#f2495c" if red and numbers[0] >= red[0] else "#73bf69"
        return f'<div class="stat" style="color: {color}">{value(numbers[0], unit)}</div>'
    if panel["type"] == "bargauge":
        shown = [(row, number) for row, number in zip(rows, numbers, strict=True) if math.isfinite(number)]
        most = max(number for _, number in shown) or 1.0
        return "".join(
            f"{html.escape(legend(row, form))} <b>{value(number, unit)}</b>"
            f'<div class="bar" style="width: {number / most:.1%}; background: #73bf69"></div>'
            for row, number in shown
        )
    labels = [label for label in dict.fromkeys(label for row in rows for label in row["metric"]) if label not in HIDDEN]
    head = "".join(f"<th>{label}</th>" for label in [*labels, "Value"])
    body = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(row['metric'].get(label, ''))}</td>" for label in labels)
        + f"<td>{value(number, unit)}</td></tr>"
        for row, number in zip(rows, numbers, strict=True)
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _lines(rows: list[dict[str, Any]], form: str, width: int, height: int) -> str:
    series = [[(float(at), float(number)) for at, number in row["values"]] for row in rows]
    first, last = min(points[0][0] for points in series), max(points[-1][0] for points in series)
    most = max(number for points in series for _, number in points) or 1.0
    out = [f'<svg width="{width}" height="{height}"><g stroke="#2a2d33">']
    out += [f'<line x1="0" x2="{width}" y1="{y}" y2="{y}"/>' for y in (4, height // 2, height - 4)]
    out.append(f'</g><text x="2" y="14" fill="#9fa3ad" font-size="10">{most:g}</text>')
    for color, points in zip(COLORS * len(series), series, strict=False):
        # Stairs: a count holds until it is counted again.
        stairs = [step for before, after in pairwise([points[0], *points]) for step in ((after[0], before[1]), after)]
        places = (((at - first) / max(last - first, 1) * width, height - 4 - number / most * (height - 8)) for at, number in stairs)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        out.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{path}"/>')
    names = [
        f'<span style="color: {color}">▬</span> {html.escape(legend(row, form))}'
        for color, row in zip(COLORS * len(rows), rows, strict=False)
    ]
    return "".join(out) + "</svg><div>" + " &nbsp; ".join(names) + "</div>"


def page(chain: Chain, dashboard: dict[str, Any]) -> tuple[str, int]:
    """The page, and its height."""
    top = 64
    parts = [
        f"<h1>{html.escape(dashboard['title'])}</h1>",
        '<div class="note">Not rendered by Grafana. The panels of deploy/grafana/dashboards/kvreg.json, drawn from what a live Prometheus '
        "answered to their queries after real workers were refused and killed.</div>",
    ]
    bottom = 0
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        left, wide = place["x"] * WIDTH // 24 + GAP // 2, place["w"] * WIDTH // 24 - GAP
        y, tall = top + place["y"] * CELL_HEIGHT, place["h"] * CELL_HEIGHT - GAP
        bottom = max(bottom, y + tall)
        where = f"left: {left}px; top: {y}px; width: {wide}px; height: {tall}px"
        if panel["type"] == "row":
            parts.append(f'<div class="row" style="{where}">{html.escape(panel["title"])}</div>')
            continue
        query = panel["targets"][0]["expr"].replace("$namespace", ".*").replace("$model", ".*")
        rows = chain.query_range(query, SHOWN_S, STEP_S) if panel["type"] == "timeseries" else chain.query(query)
        parts.append(f'<div class="panel" style="{where}"><h2>{html.escape(panel["title"])}</h2>{drawn(panel, rows)}</div>')
    return f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>" + "".join(parts), bottom + GAP


def main() -> None:
    """Start the chain, refuse workers twice, wait for the pager, and draw."""
    browser = shutil.which("chromium") or sys.exit("apt-get install chromium")
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "kvreg.json").read_text())
    with tempfile.TemporaryDirectory() as folder, Chain(Path(folder) / "chain") as chain:
        chain.work("chat:registered:8", "draft:registered:2", "search:failed:2", "code:bypassed:1")
        chain.work("chat-next:rejected:8")
        chain.receiver.wait("/page", 180, model_name="chat-next")
        chain.work("chat-next:rejected:8")
        eventually(lambda: chain.query('sum(kvreg_rule_rejections_total{model_name="chat-next"} offset 30s) == 16'), 180)
        text, height = page(chain, dashboard)
        (Path(folder) / "page.html").write_text(text)
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={WIDTH},{height}")
        subprocess.run([browser, *options, f"--screenshot={FILE}", f"file://{folder}/page.html"], check=True, capture_output=True)
    print(FILE.relative_to(ROOT))


if __name__ == "__main__":
    main()
