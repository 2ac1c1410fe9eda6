"""The files of `deploy/` that several tests read."""

import re
from pathlib import Path
from typing import Any

import yaml

from metrics.catalogue import METRICS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RULES: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "prometheus" / "kvreg.rules.yml").read_text())["groups"][0]["rules"]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RUNBOOKS = {path.stem: path.read_text() for path in (DEPLOY / "runbooks").glob("KVReg*.md")}


def metric_names(text: str) -> set[str]:
    """The names of kvreg's metrics in a text; of a histogram's series, the histogram's."""
    histograms = {f"{metric.name}_{part}": metric.name for metric in METRICS if metric.buckets for part in ("bucket", "sum", "count")}
    return {histograms.get(name, name) for name in re.findall(r"\bkvreg_[a-z_]+", text)}
