"""A production registration replayed with memory under it, bytes and all."""

from collections.abc import Hashable, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator import snapshot
from orchestrator.backend.embedded import EmbeddedBackend
from orchestrator.cli import app
from orchestrator.portal import run_sync
from orchestrator.replay import replay
from tests.offers import hybrid

CASES = sorted((Path(__file__).parents[1] / "cases").glob("*.expect.json"))
ACCEPTED = [path.with_name(path.name.replace(".expect", "")) for path in CASES if '"accepted"' in path.read_text()]


@pytest.mark.parametrize("path", ACCEPTED[::20], ids=lambda path: path.stem)
def test_a_snapshots_blocks_come_back_on_this_machine(path: Path) -> None:
    """Whatever a release's engine registered, a block of each of its groups comes back byte for byte on my laptop."""
    moved = run_sync(lambda: replay(snapshot.read(path)))
    assert moved
    assert all(group.right for group in moved), moved


class Loses(EmbeddedBackend):
    """A backend that brings back the first block for every one."""

    def retrieve(self, registration: str, engine_group_id: int, block_ids: Sequence[int], keys: Sequence[Hashable]) -> int:
        return super().retrieve(registration, engine_group_id, [0] * len(block_ids), keys)


def test_a_block_in_the_wrong_place_is_seen() -> None:
    """The comparison can fail: a backend that writes elsewhere brings nothing back, and changes what it should not."""
    moved = run_sync(lambda: replay(hybrid(), Loses()))
    assert not any(group.right or group.untouched for group in moved)


def test_the_demo_of_a_snapshot_prints_what_came_back(tmp_path: Path) -> None:
    """I pass a snapshot to the demo: exit status 0 and the bytes of each group, 1 with the refusal, 2 for no snapshot."""
    snapshot.write(hybrid(), tmp_path / "good.json")
    snapshot.write(hybrid(mode="none"), tmp_path / "bad.json")
    good, bad, none = (
        CliRunner().invoke(app, ["demo", "--snapshot", str(tmp_path / name)]) for name in ("good.json", "bad.json", "no.json")
    )
    assert (good.exit_code, bad.exit_code, none.exit_code) == (0, 1, 2)
    assert good.output.count("untouched") == 2
    assert "mamba_cache_mode" in bad.output
