"""A metric, label or alert has one name: in the code, the rules, the dashboard, the runbooks and the docs."""

import json
from collections.abc import Iterator

import yaml

from metrics.catalogue import METRICS, WORKER_LABELS
from tests.deploy.promql import tokens
from tests.deploy.sources import ALERTS, DEPLOY, ROOT, RULES, RUNBOOKS, metric_names

CATALOGUE = {metric.name for metric in METRICS}
SCRAPED = {"job", "instance", "namespace", "kvreg"}
"""Labels that a scrape adds."""

DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "kvreg.json").read_text())
EXPRESSIONS = [rule["expr"] for rule in RULES] + [
    target["expr"].replace("$namespace", "n").replace("$model", "m") for panel in DASHBOARD["panels"] for target in panel.get("targets", ())
]


def matchers(expr: str) -> Iterator[tuple[str, str]]:
    """Every label matcher of an expression."""
    parts = [(kind, text) for kind, text in tokens(expr) if kind != "space"]
    inside = False
    for at, (kind, text) in enumerate(parts):
        inside = text == "{" or (inside and text != "}")
        if inside and kind == "name":
            yield text, parts[at + 2][1].strip('"')


def grouped(expr: str) -> Iterator[str]:
    """Every label in a by, without, on or ignoring."""
    parts = [text for kind, text in tokens(expr) if kind != "space"]
    for at, text in enumerate(parts):
        if text in ("by", "without", "on", "ignoring"):
            yield from (name for name in parts[at + 2 : parts.index(")", at)] if name != ",")


def test_rules_and_dashboard_use_every_metric_and_no_other() -> None:
    """What kvreg counts can be seen, and what the rules and panels ask for exists."""
    asked = metric_names("\n".join(EXPRESSIONS))
    assert asked == CATALOGUE


def test_the_page_of_metrics_lists_exactly_the_metrics() -> None:
    """The docs name every metric, and none that does not exist."""
    assert metric_names((ROOT / "docs" / "metrics.md").read_text()) == CATALOGUE


def test_no_text_names_a_metric_that_does_not_exist() -> None:
    """No runbook, page or rule's annotation sends me to a metric that nobody exports."""
    texts = [*RUNBOOKS.values(), *(path.read_text() for path in (ROOT / "docs").glob("*.md")), (DEPLOY / "README.md").read_text()]
    texts += [text for alert in ALERTS.values() for text in alert["annotations"].values()]
    assert metric_names("\n".join(texts)) <= CATALOGUE


def test_rules_and_dashboard_use_only_labels_that_exist() -> None:
    """A label in a rule or panel is one of the catalogue's, or one that the scrape adds."""
    known = {label for metric in METRICS for label in metric.labels} | set(WORKER_LABELS) | SCRAPED | {"le"}
    alerts_own = {"alertname", "alertstate"}
    used = {label for expr in EXPRESSIONS for label in grouped(expr)} | {label for expr in EXPRESSIONS for label, _ in matchers(expr)}
    assert used <= known | alerts_own


def test_label_values_in_rules_are_values_that_occur() -> None:
    """A rule that selects a stage or an outcome selects one that kvreg has."""
    values: dict[str, set[str]] = {}
    for metric in METRICS:
        for series in metric.series:
            for label, value in zip(metric.labels, series, strict=True):
                values.setdefault(label, set()).add(value)
    selected = {(label, value) for expr in EXPRESSIONS for label, value in matchers(expr) if label in values}
    assert selected
    assert all(value in values[label] for label, value in selected)


def test_the_rules_select_the_jobs_that_are_scraped() -> None:
    """The jobs the rules and panels ask for are those that Prometheus is told to scrape, here and in Kubernetes."""
    asked = {value for expr in EXPRESSIONS for label, value in matchers(expr) if label == "job"}
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    monitor = yaml.safe_load((DEPLOY / "kubernetes" / "base" / "podmonitor.yaml").read_text())
    relabelled = {
        rule["replacement"]
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
        for rule in endpoint["relabelings"]
        if rule["targetLabel"] == "job"
    }
    assert asked == {"kvreg-ledger"}
    assert {job["job_name"] for job in config["scrape_configs"]} == relabelled == {"kvreg-ledger", "vllm"}
