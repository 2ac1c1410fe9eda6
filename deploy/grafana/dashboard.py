"""The Grafana dashboard, written as values: `python deploy/grafana/dashboard.py [--check]` writes or checks dashboards/kvreg.json."""

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

FILE = Path(__file__).parent / "dashboards" / "kvreg.json"
COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

LEDGER = 'job="kvreg-ledger", namespace=~"$namespace", model_name=~"$model"'
"""The selector of every query: the ledgers (what vLLM's own /metrics repeats of them is left out) of the chosen models."""

Kind = Literal["stat", "timeseries", "table", "bargauge"]


@dataclass(frozen=True)
class Panel:
    """One panel: what it shows, what a reader should make of it, and the query that feeds it."""

    title: str
    description: str
    kind: Kind
    query: str
    width: int
    height: int = 8
    unit: str = "short"
    legend: str = ""
    bad_from: float | None = None
    """From this value on it is shown in red."""

    def json(self, number: int, x: int, y: int) -> dict[str, Any]:
        """The panel as Grafana keeps it, at a place of the grid."""
        steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
        if self.bad_from is not None:
            steps.append({"color": "red", "value": self.bad_from})
        target: dict[str, Any] = {
            "refId": "A",
            "datasource": DATASOURCE,
            "expr": self.query,
            "legendFormat": self.legend or "__auto",
            "instant": self.kind != "timeseries",
            "range": self.kind == "timeseries",
        }
        if self.kind == "table":
            target["format"] = "table"
        out: dict[str, Any] = {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": DATASOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "fieldConfig": {"defaults": {"unit": self.unit, "thresholds": {"mode": "absolute", "steps": steps}}, "overrides": []},
            "targets": [target],
            "options": {},
        }
        if self.kind == "table":
            out["transformations"] = [{"id": "organize", "options": {"excludeByName": {"Time": True}}}]
            # The unit belongs to the value alone: a worker's id is no number of bytes.
            del out["fieldConfig"]["defaults"]["unit"]
            unit = {"matcher": {"id": "byName", "options": "Value"}, "properties": [{"id": "unit", "value": self.unit}]}
            out["fieldConfig"]["overrides"] = [unit]
        return out


@dataclass(frozen=True)
class Row:
    """A row's heading and its panels, from left to right; it breaks where it is full."""

    title: str
    panels: tuple[Panel, ...] = field(default=())


def metric(name: str, *matchers: str) -> str:
    """A metric of the chosen models' ledgers."""
    return f"{name}{{{', '.join((LEDGER, *matchers))}}}"


ROWS = (
    Row(
        "Now",
        (
            Panel(
                "Workers registered",
                "Workers whose KV caches are registered. Fewer than the engines have workers: look for refusals below.",
                "stat",
                f"sum({metric('kvreg_registered_groups')} > bool 0)",
                4,
                4,
            ),
            Panel(
                "Workers refused in 15 minutes",
                "Workers that were refused or failed in the last 15 minutes (KVRegSpecRejected, KVRegRunFailed).",
                "stat",
                "sum(time() - max by (instance, namespace, model_name, role, worker_id) "
                f"({metric('kvreg_rule_last_rejection_timestamp_seconds')}) < bool 900)",
                4,
                4,
                bad_from=1,
            ),
            Panel(
                "Workers bypassed",
                "Workers that serve without their caches registered, after a refusal (KVRegBypassed).",
                "stat",
                f"sum({metric('kvreg_bypassed')})",
                4,
                4,
                bad_from=1,
            ),
            Panel(
                "Alerts firing",
                "Alerts on kvreg that fire now, the watchdog left out.",
                "stat",
                'count(ALERTS{alertname=~"KVReg.+", alertname!="KVRegWatchdog", alertstate="firing"}) or vector(0)',
                4,
                4,
                bad_from=1,
            ),
            Panel(
                "KV cache registered",
                "Bytes of KV cache that are registered.",
                "stat",
                f"sum({metric('kvreg_registered_bytes')})",
                4,
                4,
                "bytes",
            ),
            Panel(
                "Layers registered",
                "Layers that are registered, over all workers.",
                "stat",
                f"sum({metric('kvreg_registered_layers')})",
                4,
                4,
            ),
        ),
    ),
    Row(
        "Refusals",
        (
            Panel(
                "Refusals by reason",
                "Every reason that ever refused a group. kvreg explain REASON prints the way out.",
                "table",
                f"sum by (namespace, model_name, stage, rule, reason) ({metric('kvreg_rule_rejections_total')}) > 0",
                14,
            ),
            Panel(
                "Last refusal",
                "When each stage and rule last refused a group.",
                "table",
                f"max by (namespace, model_name, stage, rule) ({metric('kvreg_rule_last_rejection_timestamp_seconds')}) * 1000 > 0",
                10,
                unit="dateTimeFromNow",
            ),
            Panel(
                "Refusals over time",
                "The ledgers' own counts, resumed over restarts: a stair that goes on rising is a loop (KVRegRejectionLoop).",
                "timeseries",
                f"sum by (model_name, reason) ({metric('kvreg_rule_rejections_total')}) > 0",
                COLUMNS,
                legend="{{model_name}} {{reason}}",
            ),
        ),
    ),
    Row(
        "Runs",
        (
            Panel(
                "Runs by outcome",
                "Registrations that ended, by how. Failed means that the transfer backend did not take the caches.",
                "timeseries",
                f"sum by (outcome) ({metric('kvreg_runs_total')})",
                12,
                legend="{{outcome}}",
            ),
            Panel(
                "Recoveries",
                "Registrations sent again after the backend lost them.",
                "timeseries",
                f"sum by (outcome) ({metric('kvreg_recoveries_total')})",
                12,
                legend="{{outcome}}",
            ),
            Panel(
                "Last start",
                "When each worker last began to register. One that began and did not end is stuck (KVRegRunStuck).",
                "table",
                f"max by (namespace, model_name, role, worker_id) ({metric('kvreg_run_last_started_timestamp_seconds')}) * 1000 > 0",
                12,
                unit="dateTimeFromNow",
            ),
            Panel(
                "Last end",
                "When each worker last ended, by outcome.",
                "table",
                "max by (namespace, model_name, role, worker_id, outcome) "
                f"({metric('kvreg_run_last_finished_timestamp_seconds')}) * 1000 > 0",
                12,
                unit="dateTimeFromNow",
            ),
        ),
    ),
    Row(
        "Stages and rules",
        (
            Panel(
                "Seconds a stage takes, mean",
                "Over every run in the ledgers: registrations are too rare for a rate.",
                "bargauge",
                f"sum by (stage) ({metric('kvreg_stage_duration_seconds_sum')}) "
                f"/ sum by (stage) ({metric('kvreg_stage_duration_seconds_count')})",
                8,
                unit="s",
                legend="{{stage}}",
            ),
            Panel(
                "Seconds a stage takes, 99th percentile",
                "Over every run in the ledgers. The stage that is slow is the one to look at (KVRegSlowRegistration).",
                "bargauge",
                f"histogram_quantile(0.99, sum by (le, stage) ({metric('kvreg_stage_duration_seconds_bucket')}))",
                8,
                unit="s",
                legend="{{stage}}",
            ),
            Panel(
                "Layers edited, by rule",
                "How many layers each rule has edited.",
                "bargauge",
                f"sum by (rule) ({metric('kvreg_rule_applications_total')}) > 0",
                8,
                legend="{{rule}}",
            ),
            Panel(
                "Groups by worker",
                "Workers of one role must agree (KVRegWorkersDisagree).",
                "table",
                f"max by (namespace, model_name, role, worker_id) ({metric('kvreg_registered_groups')})",
                12,
            ),
            Panel(
                "Versions",
                "How many workers run which versions.",
                "table",
                f"count by (version, vllm_version, lmcache_version) ({metric('kvreg_build_info')})",
                12,
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """The whole dashboard as Grafana keeps it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "panels": [],
                "gridPos": _place(0, y, COLUMNS, 1),
            }
        )
        x, y, height = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            panels.append(panel.json(len(panels) + 1, x, y))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return {
        "uid": "kvreg",
        "title": "kvreg: KV cache registration",
        "description": "What vLLM's workers registered, and what was refused and why. Generated by deploy/grafana/dashboard.py.",
        "tags": ["kvreg", "vllm", "lmcache"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "30s",
        "timezone": "browser",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_datasource(), _variable("namespace"), _variable("model", "model_name")]},
        "panels": panels,
    }


def text() -> str:
    """The file's text."""
    return json.dumps(dashboard(), indent=2) + "\n"


def _place(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


def _datasource() -> dict[str, Any]:
    return {"type": "datasource", "name": "datasource", "label": "Prometheus", "query": "prometheus", "current": {}, "hide": 0}


def _variable(name: str, label: str = "") -> dict[str, Any]:
    asked = f'label_values(kvreg_build_info{{job="kvreg-ledger"}}, {label or name})'
    return {
        "type": "query",
        "name": name,
        "datasource": DATASOURCE,
        "query": {"query": asked, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "hide": 0,
    }


def main() -> None:
    """Write the file, or with --check say whether it is what this module makes."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--check", action="store_true", help="change nothing; exit 1 if the file differs")
    if not arguments.parse_args().check:
        FILE.write_text(text())
    elif not FILE.exists() or FILE.read_text() != text():
        sys.exit(f"{FILE} is not what {Path(__file__).name} makes: run it without --check")


if __name__ == "__main__":
    main()
