"""Who is told of what: every alert of the rules, routed by the shipped configuration."""

import shutil
import subprocess
from typing import Any

import pytest
import yaml

from tests.deploy.sources import ALERTS, DEPLOY

pytestmark = pytest.mark.observability

CONFIG = DEPLOY / "alertmanager" / "alertmanager.yml"
RECEIVERS = {"critical": "page", "warning": "ticket", "none": "heartbeat"}


def amtool(*arguments: str) -> str:
    """What amtool prints."""
    assert shutil.which("amtool"), "apt-get install prometheus-alertmanager"
    return subprocess.run(["amtool", *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def config() -> Any:
    """The shipped configuration."""
    return yaml.safe_load(CONFIG.read_text())


def test_the_configuration_is_valid() -> None:
    """Alertmanager takes the file."""
    assert "SUCCESS" in amtool("check-config", str(CONFIG))


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_goes_to_the_receiver_of_its_severity(alert: str) -> None:
    """What is critical pages, what is a warning becomes a ticket, and the watchdog goes to the dead man's switch."""
    severity = ALERTS[alert]["labels"]["severity"]
    told = amtool("config", "routes", "test", f"--config.file={CONFIG}", f"alertname={alert}", f"severity={severity}", "model_name=m")
    assert told.split() == [RECEIVERS[severity]]


def test_an_alert_of_nobody_is_not_lost() -> None:
    """An alert without a severity becomes a ticket."""
    assert amtool("config", "routes", "test", f"--config.file={CONFIG}", "alertname=Other").split() == ["ticket"]


def test_workers_are_told_together(config: Any) -> None:
    """No route groups by worker, instance or reason: an engine's refusals are one notification."""
    routes = [config["route"], *config["route"]["routes"]]
    assert [route["group_by"] for route in routes if "group_by" in route] == [["alertname", "namespace", "model_name"]]


def test_a_group_waits_for_a_whole_scrape_and_evaluation(config: Any) -> None:
    """Workers that are refused around a scrape are all in the first notification."""
    prometheus = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["global"]
    waits = [int(text.removesuffix("s")) for text in (prometheus["scrape_interval"], prometheus["evaluation_interval"])]
    assert int(config["route"]["group_wait"].removesuffix("s")) >= sum(waits)


def test_every_muted_alert_exists(config: Any) -> None:
    """No inhibition names an alert that is not in the rules."""
    named = [
        name
        for rule in config["inhibit_rules"]
        for matcher in (*rule["source_matchers"], *rule["target_matchers"])
        for name in matcher.partition("~" if "~" in matcher else "=")[2].strip(' "').split("|")
    ]
    assert named
    assert set(named) <= set(ALERTS)
