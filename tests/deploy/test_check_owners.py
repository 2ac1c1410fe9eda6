"""The image build's check that no other distribution installs kvreg's package names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parent.parent.parent / "deploy" / "check_owners.py"


def distribution(folder: Path, name: str, *files: str) -> None:
    """What pip writes when it installs a distribution of these files."""
    record = folder / f"{name}-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (record / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file in files:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).touch()


def check_owners(folder: Path) -> subprocess.CompletedProcess[str]:
    """The check, in an environment whose only installed distributions are those in `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, "-S", CHECK], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A folder with kvreg's own three packages and a bystander installed."""
    distribution(tmp_path, "kvreg", "orchestrator/__init__.py", "stages/__init__.py", "metrics/__init__.py")
    distribution(tmp_path, "bystander", "bystander/__init__.py")
    return tmp_path


def test_an_environment_where_kvreg_owns_its_names_passes(environment: Path) -> None:
    """The image is made, without a word."""
    run = check_owners(environment)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_a_second_owner_is_named(environment: Path) -> None:
    """Each contested name is one line that says which distribution to uninstall."""
    distribution(environment, "pipelines", "stages/other.py")
    distribution(environment, "gauges", "metrics.py")
    run = check_owners(environment)
    assert run.returncode == 1
    assert run.stderr.splitlines() == [
        "package 'stages' of kvreg is also installed by pipelines: uninstall it",
        "package 'metrics' of kvreg is also installed by gauges: uninstall it",
    ]


def test_an_environment_without_kvreg_fails(tmp_path: Path) -> None:
    """An image that kvreg never reached is not a good one."""
    run = check_owners(tmp_path)
    assert run.returncode == 1
    assert run.stderr.startswith("kvreg is not installed in ")
