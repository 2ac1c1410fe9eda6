"""No test is skipped in silence where its component must be there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent.parent / "conftest.py"

ONE_TEST_SKIPS = """
import pytest

def test_runs():
    pass

def test_skips():
    pytest.skip("no server")

@pytest.mark.gpu
def test_skips_without_gpu():
    pytest.skip("no device")
"""

ONE_MODULE_SKIPS = "import pytest\npytest.importorskip('a_module_nobody_has')\n"


@pytest.mark.parametrize(
    ("environment", "closing"),
    [
        ({}, "1 passed, 3 skipped"),
        ({"CI": "true"}, "1 failed, 1 passed, 2 skipped"),
        ({"KVREG_COMPLETE": "1"}, "1 failed, 1 passed, 1 skipped, 1 error"),
    ],
)
def test_a_skip_is_a_failure_where_nothing_may_be_missing(tmp_path: Path, environment: dict[str, str], closing: str) -> None:
    """A green run means the real component was there: a skip for want of it fails, except for want of a GPU."""
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_one.py").write_text(ONE_TEST_SKIPS)
    (tmp_path / "test_other.py").write_text(ONE_MODULE_SKIPS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a device\n")
    outside = {name: value for name, value in os.environ.items() if name not in {"CI", "KVREG_COMPLETE"} and not name.startswith("PYTEST_")}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"],
        cwd=tmp_path,
        env=outside | environment | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.splitlines()[-1].startswith(closing), run.stdout + run.stderr
