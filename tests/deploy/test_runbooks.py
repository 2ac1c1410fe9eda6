"""Every page ends: each alert has a runbook, each reason a way out, and what they tell me to run exists."""

import re
import subprocess
import sys

import pytest
import yaml

from orchestrator.cli import app
from orchestrator.explain import MEANINGS, Actor, explain, way_out
from stages.errors import Reason
from tests.deploy.sources import ALERTS, DEPLOY, ROOT, RUNBOOKS

SECTIONS = ("**Meaning.**", "**Impact.**", "## Diagnosis", "## Way out")


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    """The link in a page leads somewhere, and no runbook is left over."""
    assert set(RUNBOOKS) == set(ALERTS)
    for name, alert in ALERTS.items():
        assert alert["annotations"]["runbook_url"] == f"deploy/runbooks/{name}.md"
        assert (ROOT / alert["annotations"]["runbook_url"]).exists()


@pytest.mark.parametrize("name", sorted(RUNBOOKS))
def test_a_runbook_says_meaning_impact_diagnosis_and_way_out(name: str) -> None:
    """Every runbook has the same four parts in the same order, and a diagnosis has commands."""
    text = RUNBOOKS[name]
    assert text.startswith(f"# {name}\n")
    places = [text.find(section) for section in SECTIONS]
    assert -1 not in places
    assert places == sorted(places)
    assert re.search(r"^ {4}\S", text[places[2] : places[3]], re.MULTILINE), "a diagnosis without a command"


def test_the_index_lists_every_alert_with_its_severity() -> None:
    """The overview is the rules': same alerts, same order, same severities."""
    rows = re.findall(r"^\| \[(\w+)\]\(\1\.md\) \| (\w+) \|", (DEPLOY / "runbooks" / "README.md").read_text(), re.MULTILINE)
    assert rows == [(name, alert["labels"]["severity"]) for name, alert in ALERTS.items()]


def test_links_between_runbooks_lead_somewhere() -> None:
    """No dead link."""
    for text in RUNBOOKS.values():
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert (DEPLOY / "runbooks" / target).exists(), target


def test_every_alert_says_what_happened_and_where_to_read_on() -> None:
    """An alert's text has a summary, a description and a runbook; what refused carries reason, stage and rule."""
    for alert in ALERTS.values():
        assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    for name in ("KVRegSpecRejected", "KVRegRejectionLoop"):
        text = " ".join(ALERTS[name]["annotations"].values())
        assert all(f"$labels.{label}" in text for label in ("reason", "stage", "rule"))


def test_every_alert_has_a_case_that_fires_it_and_one_that_does_not() -> None:
    """No alert is untested."""
    for name in ALERTS:
        tests = yaml.safe_load((DEPLOY / "prometheus" / "tests" / f"{name}.test.yml").read_text())["tests"]
        cases = [case for test in tests for case in test["alert_rule_test"]]
        assert {case["alertname"] for case in cases} == {name}
        assert {bool(case["exp_alerts"]) for case in cases} == {True, False}


def test_commands_of_kvreg_in_alerts_and_runbooks_exist() -> None:
    """What I am told to type is a command that kvreg has."""
    commands = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    texts = [*RUNBOOKS.values(), *(text for alert in ALERTS.values() for text in alert["annotations"].values())]
    told = set(re.findall(r"(?:^ {4}|`|: )kvreg ([a-z]+) [A-Z{]", "\n".join(texts), re.MULTILINE))
    assert told == {"explain", "check"}
    assert told <= commands


@pytest.mark.parametrize("reason", Reason)
def test_explain_says_meaning_way_out_and_what_to_run(reason: Reason) -> None:
    """`kvreg explain REASON` says what it means and how to end it, whatever the reason."""
    lines = explain(reason).splitlines()
    assert lines[0] == reason.value
    assert lines[2] == MEANINGS[reason].says
    assert f"Way out: {way_out(reason)}" in lines
    assert MEANINGS[reason].actor.value in lines
    if reason is not Reason.SHUTTING_DOWN:
        assert any(line.startswith("  kvreg check SNAPSHOT") for line in lines)


def test_who_acts_agrees_with_the_hint() -> None:
    """A hint that says to report or to add a rule is not told to an operator as a setting."""
    for reason, meaning in MEANINGS.items():
        hint = way_out(reason)
        assert ("report" in hint and "snapshot" in hint) <= (meaning.actor is Actor.REPORT), reason
        assert ("add a rule" in hint or ("fix" in hint and "rule" in hint)) <= (meaning.actor is Actor.DEVELOPER), reason


def test_the_command_prints_the_explanation() -> None:
    """In a terminal, `kvreg explain width` prints it; a reason that does not exist is named with those that do."""
    ran = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", "explain", "width"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.rstrip("\n") == explain(Reason.WIDTH)
    unknown = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", "explain", "no"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert unknown.returncode == 2
    assert "mamba_cache_mode" in unknown.stderr
