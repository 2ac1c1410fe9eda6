"""kvreg runs on its own three packages, or says whose it found instead."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def import_orchestrator(*path: Path) -> subprocess.CompletedProcess[str]:
    """`import orchestrator` in a new interpreter that looks in these folders first."""
    environment = {"PYTHONPATH": ":".join(map(str, path))}
    command = [sys.executable, "-P", "-c", "import orchestrator"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_kvreg_imports_where_its_packages_lie_together() -> None:
    """The ordinary case imports, and says nothing."""
    run = import_orchestrator(ROOT)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ["stages", "metrics"])
@pytest.mark.parametrize("module", ["{}/__init__.py", "{}.py"])
def test_another_package_of_that_name_is_one_clear_error(tmp_path: Path, name: str, module: str) -> None:
    """A stranger named `stages` first on the path is never imported as ours: one line gives both paths and the way out."""
    stranger = tmp_path / module.format(name)
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_text("raise SystemExit('the stranger was imported')\n")
    run = import_orchestrator(tmp_path, ROOT)
    error = run.stderr.splitlines()[-1]
    assert run.returncode == 1
    assert error.startswith(f"ImportError: kvreg needs its own package {name!r} at {ROOT / name},")
    assert str(stranger.parent) in error
    assert "PYTHONSAFEPATH=1" in error
