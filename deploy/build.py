"""Everything in `deploy/` and `docs/` that is made from something else: `python deploy/build.py [--check]`.

The alert rules are written in prometheus/kvreg.rules.yml, the dashboard in grafana/dashboard.py, metrics in
metrics/catalogue.py, reasons in stages/errors.py and orchestrator/explain.py. Kustomize and Helm read only files below
their own folders, so they get copies; --check says whether every copy is what its source makes.
"""

import argparse
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import indent

DEPLOY = Path(__file__).resolve().parent
sys.path.insert(0, str(DEPLOY.parent))

from metrics.catalogue import METRICS, WORKER_LABELS  # noqa: E402 - this repository's, not one that happens to be installed
from orchestrator.explain import MEANINGS, way_out  # noqa: E402

RULES = DEPLOY / "prometheus" / "kvreg.rules.yml"


def prometheus_rule() -> str:
    """The alert rules as the Prometheus operator takes them."""
    head = """\
# Made by deploy/build.py from deploy/prometheus/kvreg.rules.yml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: kvreg
  labels:
    app.kubernetes.io/name: kvreg
spec:
"""
    return head + indent(RULES.read_text(), "  ")


def reasons() -> str:
    """The runbooks' page of reasons."""
    lines = [
        "# Reasons",
        "",
        "Made by deploy/build.py from what `kvreg explain REASON` prints. In a way out, `<names>` stand for facts of the refusal.",
    ]
    for reason, meaning in MEANINGS.items():
        hint = way_out(reason).replace("<", "&lt;").replace(">", "&gt;")
        lines += ["", f"## {reason.value}", "", meaning.says, "", f"**Way out:** {hint}", "", meaning.actor.value]
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """The page of metrics."""
    everywhere = ", ".join(f"`{name}`" for name in WORKER_LABELS)
    lines = [
        "# Metrics",
        "",
        f"Made by deploy/build.py from metrics/catalogue.py. Every metric has the labels {everywhere}",
        "and its own, each from a closed set: a worker has the number of series that stands in the last column, never more.",
        "",
        "| metric | type | own labels | says | series a worker |",
        "|---|---|---|---|---|",
    ]
    for metric in METRICS:
        labels = ", ".join(f"`{name}`" for name in metric.labels)
        # A histogram's series: its buckets, +Inf among them, its sum and its count.
        series = len(metric.series) * (len(metric.buckets) + 3 if metric.type == "histogram" else 1)
        lines.append(f"| `{metric.name}` | {metric.type} | {labels} | {metric.help} | {series} |")
    return "\n".join(lines) + "\n"


def made() -> Mapping[Path, str]:
    """Every made file and its text."""
    dashboard = str(runpy.run_path(str(DEPLOY / "grafana" / "dashboard.py"))["text"]())
    return {
        DEPLOY / "grafana" / "dashboards" / "kvreg.json": dashboard,
        DEPLOY / "kubernetes" / "base" / "kvreg.json": dashboard,
        DEPLOY / "helm" / "kvreg" / "files" / "kvreg.json": dashboard,
        DEPLOY / "kubernetes" / "base" / "prometheusrule.yaml": prometheus_rule(),
        DEPLOY / "helm" / "kvreg" / "files" / "kvreg.rules.yml": RULES.read_text(),
        DEPLOY / "runbooks" / "reasons.md": reasons(),
        DEPLOY.parent / "docs" / "metrics.md": metrics(),
    }


def main() -> None:
    """Write the files, or with --check name those that differ and exit with 1."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--check", action="store_true", help="change nothing; exit 1 if a file is not what it should be")
    if not arguments.parse_args().check:
        for path, text in made().items():
            path.write_text(text)
        return
    stale = [str(path.relative_to(DEPLOY.parent)) for path, text in made().items() if not path.exists() or path.read_text() != text]
    if stale:
        sys.exit(f"run python deploy/build.py: {', '.join(stale)} differ from what they are made from")


if __name__ == "__main__":
    main()
