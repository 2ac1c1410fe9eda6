"""`kvreg`, `kvreg --version` and `kvreg rules`: what there is, and what can be refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.cli import main
from stages.edit import IDENTITY_SPLIT_VIEW
from stages.errors import Reason
from stages.rules import RULES

ROOT = Path(__file__).parent.parent.parent


def kvreg(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit status and standard output of the command."""
    monkeypatch.setattr(sys, "argv", ["kvreg", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    code = ended.value.code
    assert code is None or isinstance(code, int)
    return code or 0, capsys.readouterr().out


def test_every_rule_and_every_reason_is_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever met a rule or reason in an answer finds it here, in full and unbroken."""
    monkeypatch.setenv("COLUMNS", "100")
    status, out = kvreg(monkeypatch, capsys, "rules")
    assert status == 0
    words = out.split()
    missing = ({rule.name for rule in RULES} | {IDENTITY_SPLIT_VIEW} | set(Reason)) - set(words)
    assert not missing
    listed = [word for word in words if word in {rule.name for rule in RULES}]
    assert listed == [rule.name for rule in RULES]
    assert max(map(len, out.splitlines())) <= 100


def test_rules_and_hints_are_there_for_programs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A dashboard can be built from the same list: rules in order, each reason with its hint."""
    status, out = kvreg(monkeypatch, capsys, "rules", "--json")
    answer = json.loads(out)
    assert (status, list(answer), len(out.splitlines())) == (0, ["rules", "reasons"], 1)
    assert [(rule["rule"], rule["summary"]) for rule in answer["rules"]] == [(rule.name, rule.summary) for rule in RULES]
    assert [reason["reason"] for reason in answer["reasons"]] == list(Reason)
    assert all(reason["hint"] for reason in answer["reasons"])
    chunk = next(reason for reason in answer["reasons"] if reason["reason"] == Reason.CHUNK_SIZE)
    assert "<smallest_valid_chunk_tokens>" in chunk["hint"]


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["check", "--help"]])
def test_help_and_version_do_not_wait_for_torch(arguments: list[str], tmp_path: Path) -> None:
    """The command answers at once where nothing has to be computed: torch, which takes seconds, is not loaded."""
    program = f"""
import sys
from orchestrator.cli import main
sys.argv = ["kvreg", *{arguments!r}]
try:
    main()
except SystemExit as ended:
    sys.exit("torch was loaded" if "torch" in sys.modules else ended.code)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "kvreg" in done.stdout


def test_a_wrong_command_is_said_to_be_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A typing mistake ends with exit status 2 and the words that help, not in a traceback."""
    monkeypatch.setattr(sys, "argv", ["kvreg", "chekc"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "No such command" in capsys.readouterr().err
