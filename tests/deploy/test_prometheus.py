"""Prometheus takes the shipped files, and the rules do what their tests say."""

import shutil
import subprocess

import pytest

from tests.deploy.sources import ALERTS, DEPLOY

pytestmark = pytest.mark.observability


def promtool(*arguments: str) -> str:
    """What promtool prints; its failure is the test's."""
    assert shutil.which("promtool"), "apt-get install prometheus"
    ran = subprocess.run(["promtool", *arguments], cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_configuration_and_the_rules_are_valid() -> None:
    """Prometheus starts with them."""
    assert "valid prometheus config" in promtool("check", "config", "prometheus.yml")


def test_every_alert_fires_and_stays_silent_as_its_test_says() -> None:
    """The promtool tests beside the rules pass, one file an alert."""
    files = sorted(path.name for path in (DEPLOY / "prometheus" / "tests").iterdir())
    assert files == sorted(f"{alert}.test.yml" for alert in ALERTS)
    assert promtool("test", "rules", *(f"tests/{file}" for file in files)).count("SUCCESS") == len(ALERTS)
