"""What holds for every test: reproducible examples, and no silent skip where a real component must be there."""

import os
from collections.abc import Generator
from typing import TypeVar

import pytest
from hypothesis import settings

IN_CI = os.environ.get("CI") == "true"
COMPLETE = os.environ.get("KVREG_COMPLETE") == "1"
"""Set by `make test` once the engine and the servers are installed; before that a module may do without them."""

MAY_BE_MISSING = {"gpu"} if IN_CI else {"gpu", "kubectl"}
"""Markers of tests that may skip even then: a device cannot be installed, and Debian has no kubectl that will do."""

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

settings.register_profile("kvreg", deadline=None, derandomize=IN_CI)
settings.load_profile("kvreg")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that skips itself fails in CI and in a complete environment, but for what `MAY_BE_MISSING` names."""
    report = yield
    allowed = any(map(item.get_closest_marker, MAY_BE_MISSING)) or not (IN_CI or COMPLETE)
    return report if allowed else _failed_if_skipped(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that skips itself fails in a complete environment."""
    report = yield
    return _failed_if_skipped(report) if COMPLETE else report


def _failed_if_skipped(report: Report) -> Report:
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be missing: {report.longrepr}"
    return report
