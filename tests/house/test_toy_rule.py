"""The walk-through of CONTRIBUTING.md, done exactly as it stands there."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import oracle

ROOT = Path(__file__).parent.parent.parent
BLOCK = re.compile(r"^```(json|python|diff) (\S+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)

SNAPSHOT = "tests/cases/key-value-list.json"
EXPECTED = "tests/cases/key-value-list.expect.json"
RULE = "stages/rules/key_value_list.py"
TEST = "tests/stages/rules/test_key_value_list.py"
REGISTRY = "stages/rules/__init__.py"


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of the sources that the walk-through changes or runs."""
    ignored = shutil.ignore_patterns("__pycache__", "cases", ".*")
    for folder in ("orchestrator", "metrics", "stages", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def steps() -> list[tuple[str, str, str]]:
    """Language, path and text of each block of the walk-through, in order."""
    return [match.groups() for match in BLOCK.finditer((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))]  # type: ignore[misc]


def shown_refusal() -> str:
    """The refusal that the walk-through shows."""
    shown = re.search(r"^    (edit: .*\n(?:    .*\n)*)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert shown is not None
    return " ".join(shown[1].split())


def follow(house: Path, *paths: str) -> None:
    """Do the steps that write these files: a whole file, or lines between lines that are there."""
    for language, path, text in steps():
        if path not in paths:
            continue
        file = house / path
        if language == "diff":
            lines = text.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if not line.startswith("+"))
            after = "".join(line[1:] for line in lines)
            source = file.read_text(encoding="utf-8")
            assert source.count(before) == 1, f"{path} has no single place for:\n{text}"
            file.write_text(source.replace(before, after), encoding="utf-8")
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")


def run(house: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python module of the copy, in a new interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(house), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run([sys.executable, "-m", *arguments], cwd=house, env=environment, capture_output=True, text=True, check=False)


def check(house: Path) -> tuple[int, dict[str, Any]]:
    """Exit status and answer of `kvreg check --json` on the snapshot."""
    answer = run(house, "orchestrator.cli", "check", "--json", SNAPSHOT)
    assert len(answer.stdout.splitlines()) == 1, answer.stdout + answer.stderr
    return answer.returncode, json.loads(answer.stdout)


def test_the_walk_through_is_one_file_one_line_one_snapshot_one_test() -> None:
    """The guide asks for no more than it promises: a rule, its line in RULES, a snapshot with its verdict, a test."""
    assert [(language, path) for language, path, _ in steps()] == [
        ("json", SNAPSHOT),
        ("json", EXPECTED),
        ("python", RULE),
        ("diff", REGISTRY),
        ("diff", REGISTRY),
        ("python", TEST),
    ]
    added = [line for language, _, text in steps() if language == "diff" for line in text.splitlines() if line.startswith("+")]
    assert len(added) == 2


def test_a_layout_that_is_refused_today_is_served_after_the_walk_through(house: Path) -> None:
    """Before, the layer is refused by name; after the guide's steps the snapshot is accepted and the bytes come back."""
    follow(house, SNAPSHOT, EXPECTED, TEST)
    status, refused = check(house)
    assert (status, refused["outcome"]) == (1, "rejected")
    assert [(refusal["reason"], refusal["layer_names"]) for refusal in refused["rejections"]] == [("unreadable_view", ["layers.0.attn"])]
    assert shown_refusal() == f"{refused['rejections'][0]['message']}; {refused['rejections'][0]['hint']}"

    follow(house, RULE, REGISTRY)
    status, accepted = check(house)
    assert (status, accepted["outcome"]) == (0, "accepted")
    assert oracle.complaints(house / SNAPSHOT, accepted) == []
    assert [(layer["name"], layer["rule"]) for layer in accepted["layers"]] == [("layers.0.attn", "key-value-list-view")]

    tested = run(house, "pytest", "-q", "-p", "no:cacheprovider", TEST)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "1 passed" in tested.stdout


def test_the_guide_s_files_are_clean(house: Path) -> None:
    """Whoever copies the example need not tidy it up."""
    follow(house, RULE, REGISTRY, TEST)
    for command in (["ruff", "check"], ["ruff", "format", "--check"]):
        checked = run(house, *command, RULE, REGISTRY, TEST)
        assert checked.returncode == 0, checked.stdout + checked.stderr
