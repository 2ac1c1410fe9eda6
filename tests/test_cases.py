"""Every snapshot in `tests/cases`, judged by bytes by an oracle that knows nothing of kvreg's rules."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import oracle

CASES = Path(__file__).parent / "cases"
SNAPSHOTS = oracle.snapshots(CASES)


@pytest.fixture(scope="module")
def answers() -> Mapping[str, dict[str, Any]]:
    """What `kvreg check --json` says about all of them, asked once as a user asks."""
    command = [sys.executable, "-m", "orchestrator.cli", "check", "--json", *map(str, SNAPSHOTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=CASES.parent.parent)
    assert (done.returncode, done.stderr) == (1, ""), "some of the cases must be rejected, none is unusable"
    documents = [json.loads(line) for line in done.stdout.splitlines()]
    assert [document["snapshot"] for document in documents] == list(map(str, SNAPSHOTS)), "one answer a line, in order"
    return {Path(document["snapshot"]).stem: document for document in documents}


@pytest.mark.parametrize("snapshot", SNAPSHOTS, ids=lambda snapshot: snapshot.stem)
def test_the_answer_is_right_by_bytes(snapshot: Path, answers: Mapping[str, dict[str, Any]]) -> None:
    """For this registration the transfer touches exactly each block's own bytes, or kvreg refuses it and names whom."""
    wrong = oracle.complaints(snapshot, answers[snapshot.stem])
    assert not wrong, "\n".join([snapshot.name, *wrong])


def test_the_cases_are_all_here() -> None:
    """A case that is lost, or has no expectation, is noticed."""
    assert len(SNAPSHOTS) >= 374
    assert all(snapshot.with_suffix(".expect.json").is_file() for snapshot in SNAPSHOTS)


def test_the_oracle_sees_a_wrong_address() -> None:
    """The judge is no rubber stamp: one layer's view moved by one row, shortened, or regrouped is complained about."""
    snapshot = CASES / "0.33.0-LBNHC-qwen3-5-0-8b-flashinfer.json"
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", "check", "--json", str(snapshot)],
        capture_output=True,
        text=True,
        check=True,
        cwd=CASES.parent.parent,
    )
    for break_one in (_move, _shorten, _regroup, _forget):
        answer = json.loads(done.stdout)
        break_one(answer)
        assert oracle.complaints(snapshot, answer), break_one.__name__
    assert not oracle.complaints(snapshot, json.loads(done.stdout))


def _move(answer: dict[str, Any]) -> None:
    answer["layers"][-1]["view"]["storage_offset"] += answer["layers"][-1]["view"]["stride"][-2]


def _shorten(answer: dict[str, Any]) -> None:
    answer["layers"][-1]["view"]["shape"][-1] -= 1


def _regroup(answer: dict[str, Any]) -> None:
    answer["groups"][0]["engine_group_id"] += 1


def _forget(answer: dict[str, Any]) -> None:
    answer["layers"].pop()
