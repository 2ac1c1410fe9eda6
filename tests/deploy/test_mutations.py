"""The promtool tests would notice a mistake: every mutant of every rule makes one of them fail."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.promql import mutants, tokens

PROMETHEUS = Path(__file__).parents[2] / "deploy" / "prometheus"
pytestmark = pytest.mark.observability

RULES: list[dict[str, Any]] = yaml.safe_load((PROMETHEUS / "kvreg.rules.yml").read_text())["groups"][0]["rules"]
RECORDED_FOR = {"kvreg:required_engine_started:timestamp_seconds": "KVRegNotLoaded"}
"""The alert through which a recording rule is tested."""


@pytest.fixture(scope="module", autouse=True)
def promtool() -> None:
    """The tool these tests are about; its absence is a failure that says what to install."""
    assert shutil.which("promtool"), "apt-get install prometheus"


def names(rule: dict[str, Any]) -> str:
    """The alert that tests a rule."""
    return str(rule.get("alert") or RECORDED_FOR[rule["record"]])


def together(alert: str, mutant: dict[str, Any], original: dict[str, Any]) -> dict[str, Any]:
    """A rules file with what one alert needs, one rule of it replaced."""
    rules = [mutant if rule is original else rule for rule in RULES if names(rule) == alert]
    return {"groups": [{"name": "kvreg", "rules": rules}]}


@pytest.mark.parametrize("alert", sorted({names(rule) for rule in RULES}))
def test_every_mistake_in_a_rule_is_noticed(alert: str, tmp_path: Path) -> None:
    """If I change a threshold, a comparison, a label, a duration or a `for` of this alert, one of its tests fails."""
    tests = yaml.safe_load((PROMETHEUS / "tests" / f"{alert}.test.yml").read_text())
    changed: dict[str, str] = {}
    for original in (rule for rule in RULES if names(rule) == alert):
        for number, (what, mutant) in enumerate([("unchanged", original), *mutants(original)]):
            name = f"{original.get('record', 'alert').split(':')[-1]}-{number}"
            (tmp_path / f"{name}.rules.yml").write_text(yaml.safe_dump(together(alert, mutant, original)))
            (tmp_path / f"{name}.test.yml").write_text(yaml.safe_dump({**tests, "rule_files": [f"{name}.rules.yml"]}))
            changed[f"{name}.test.yml"] = what
    assert len(changed) > 5
    ran = subprocess.run(["promtool", "test", "rules", *changed], cwd=tmp_path, capture_output=True, text=True, check=False)
    # promtool says SUCCESS under a file's name on stdout; what failed, or could not be read, is told elsewhere.
    passed = set(re.findall(r"Unit Testing:\s+(\S+)\n\s+SUCCESS", ran.stdout))
    assert {name for name, what in changed.items() if what == "unchanged"} <= passed, ran.stderr
    survivors = sorted({changed[name] for name in passed} - {"unchanged"})
    assert not survivors


def test_the_mutants_are_the_mistakes_meant() -> None:
    """The mutants of a small rule are exactly these."""
    rule = {"alert": "A", "expr": 'max by (a, b) (m{x="y"}[5m]) > 3', "for": "1m", "labels": {"s": "t"}, "annotations": {"n": "o"}}
    found = {(mutant["expr"], mutant.get("for"), str(mutant["labels"])) for _, mutant in mutants(rule)}
    expressions = {expr for expr, _, _ in found} - {rule["expr"]}
    assert expressions == {
        'max by (b) (m{x="y"}[5m]) > 3',
        'max by (a) (m{x="y"}[5m]) > 3',
        "max by (a, b) (m{}[5m]) > 3",
        'max by (a, b) (m{x!="y"}[5m]) > 3',
        'max by (a, b) (m{x="yx"}[5m]) > 3',
        'max by (a, b) (m{x="y"}[360s]) > 3',
        'max by (a, b) (m{x="y"}[240s]) > 3',
        'max by (a, b) (m{x="y"}[5m]) >= 3',
        'max by (a, b) (m{x="y"}[5m]) <= 3',
        'max by (a, b) (m{x="y"}[5m]) > 4',
        'max by (a, b) (m{x="y"}[5m]) > 2',
    }
    assert {wait for _, wait, _ in found} == {"0m", "1m", "2m"}
    assert len(list(mutants(rule))) == 11 + 2 + 2 + 1 + 1


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_no_token_of_a_rule_is_overlooked(rule: dict[str, Any]) -> None:
    """Every rule is read whole: joined again, its tokens are its text."""
    assert "".join(text for _, text in tokens(rule["expr"])) == rule["expr"]
