"""Snapshots kept beside registrations."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import snapshot
from orchestrator.check import Rejected, check
from orchestrator.config import KVRegConfig
from orchestrator.snapshots import keep_snapshot
from stages.errors import Reason
from stages.validate import validate
from tests.offers import BLOCK, hybrid


def kept(folder: Path) -> list[str]:
    """The names of the snapshots in a folder."""
    return sorted(file.name for file in folder.iterdir())


def test_a_kept_snapshot_replays_to_the_same_answer(tmp_path: Path) -> None:
    """I take the file of a production registration home, and it is accepted there as it was here."""
    offer = replace(hybrid(), model_name="org/Some Model")
    keep_snapshot(offer, KVRegConfig(snapshot_dir=tmp_path / "new"), refused=False)
    (name,) = kept(tmp_path / "new")
    assert "org_Some_Model-rank0-" in name
    assert name.endswith("-registered.kvreg.json")
    again = validate(snapshot.read(tmp_path / "new" / name))
    assert [layer.name for layer in again.layers] == [layer.name for layer in validate(offer).layers]


def test_a_refusal_at_the_start_is_kept_and_replays_to_the_same_answer(tmp_path: Path) -> None:
    """The engine ended before it had a single cache; at home its snapshot is refused for the same reason, and no other."""
    offer = replace(hybrid(), caches={}, chunk_size_tokens=BLOCK + 1)
    keep_snapshot(offer, KVRegConfig(snapshot_dir=tmp_path), refused=True)
    (name,) = kept(tmp_path)
    verdict, again = check(offer), check(snapshot.read(tmp_path / name))
    assert isinstance(verdict, Rejected)
    assert isinstance(again, Rejected)
    assert again.rejections == verdict.rejections
    assert {rejection.reason for rejection in again.rejections} == {Reason.CHUNK_SIZE}


def test_their_number_is_bounded_and_the_newest_stay(tmp_path: Path) -> None:
    """An engine that restarts for weeks does not fill the disk."""
    config = KVRegConfig(snapshot_dir=tmp_path, snapshot_limit=3)
    for age in range(3):
        old = tmp_path / f"old-{age}.kvreg.json"
        old.write_text("{}")
        os.utime(old, (1000 + age, 1000 + age))
    (tmp_path / "someone-else.json").write_text("{}")
    keep_snapshot(hybrid(), config, refused=True)
    assert [name for name in kept(tmp_path) if name.startswith("old")] == ["old-1.kvreg.json", "old-2.kvreg.json"]
    assert "someone-else.json" in kept(tmp_path)


def test_the_newest_stays_though_the_clock_was_set_back(tmp_path: Path) -> None:
    """The host's time jumps back an hour: the snapshot that the log has just named is there, and one of the old ones is not."""
    config = KVRegConfig(snapshot_dir=tmp_path, snapshot_limit=2)
    ahead = time.time() + 3600
    for age in range(2):
        old = tmp_path / f"old-{age}.kvreg.json"
        old.write_text("{}")
        os.utime(old, (ahead + age, ahead + age))
    keep_snapshot(hybrid(), config, refused=True)
    (left, new) = sorted(kept(tmp_path), reverse=True)
    assert left == "old-1.kvreg.json"
    assert new.endswith("-refused.kvreg.json")


def test_workers_that_keep_snapshots_at_once_do_not_stumble_over_each_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of eight workers each removes what it sees, and a file that another has removed is no error."""
    config = KVRegConfig(snapshot_dir=tmp_path, snapshot_limit=1)
    with ThreadPoolExecutor(8) as workers:
        for rank in range(24):
            workers.submit(keep_snapshot, hybrid(rank=rank), config, refused=True)
    assert "could not keep" not in caplog.text
    assert kept(tmp_path)


def test_a_folder_that_cannot_be_written_is_told_and_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A full or read-only disk does not stop my engine."""
    (tmp_path / "file").write_text("")
    keep_snapshot(hybrid(), KVRegConfig(snapshot_dir=tmp_path / "file"), refused=False)
    assert "could not keep a snapshot" in caplog.text


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kvreg writes no file that I did not ask for."""
    monkeypatch.chdir(tmp_path)
    keep_snapshot(hybrid(), KVRegConfig(), refused=True)
    assert kept(tmp_path) == []
