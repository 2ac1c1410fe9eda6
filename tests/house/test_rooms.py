"""Each room knows what it says it knows: the import contracts, and that they can break."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ROOMS = ("orchestrator", "metrics", "stages")

VIOLATIONS = [
    ("stages/pages.py", "import metrics.observer", "imports point one way"),
    ("metrics/observer.py", "import orchestrator.pipeline", "imports point one way"),
    ("stages/edit.py", "import structlog", "stages know torch"),
    ("stages/rules/rule.py", "from vllm.v1 import kv_cache_interface", "stages know torch"),
    ("stages/validate.py", "import anyio", "stages know torch"),
    ("metrics/observer.py", "import typer", "metrics know stages"),
    ("orchestrator/pipeline.py", "def late() -> None:\n    import vllm", "vLLM is known"),
    ("orchestrator/portal.py", "from lmcache.v1 import config", "LMCache is known"),
]


def lint_imports(house: Path) -> subprocess.CompletedProcess[str]:
    """The import contracts on the rooms of `house`."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=house, env={"PYTHONPATH": str(house)}, capture_output=True, text=True, check=False)


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of the rooms and their contracts."""
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_contracts_hold() -> None:
    """No room imports what it must not know."""
    run = lint_imports(ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 broken" in run.stdout


@pytest.mark.parametrize(("path", "statement", "contract"), VIOLATIONS)
def test_a_violating_import_breaks_its_contract(house: Path, path: str, statement: str, contract: str) -> None:
    """One import in the wrong room, and the check names the contract that it breaks and the import."""
    with (house / path).open("a") as module:
        module.write(f"\n\n{statement}\n")
    run = lint_imports(house)
    broken = [line for line in run.stdout.splitlines() if " BROKEN" in line]
    assert run.returncode == 1, run.stdout + run.stderr
    assert any(line.startswith(contract) for line in broken), run.stdout
    assert path.removesuffix(".py").replace("/", ".") in run.stdout


def test_stages_import_torch_and_the_standard_library_only() -> None:
    """The contracts name what is forbidden; here all that is not named is forbidden too."""
    known = {*sys.stdlib_module_names, "torch", "stages"}
    strangers = {
        (str(path.relative_to(ROOT)), package)
        for path in (ROOT / "stages").rglob("*.py")
        for package in imported(path)
        if package not in known
    }
    assert strangers == {("stages/transfer.py", "anyio")}


def imported(path: Path) -> set[str]:
    """Top-level packages that a module imports, wherever in it."""
    packages = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            packages.add((node.module or "").split(".")[0])
    return packages
