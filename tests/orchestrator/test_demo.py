"""`kvreg demo`: the main job on real memory, and a judge of it that can say no."""

import re
import subprocess
import sys
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from orchestrator import screen
from orchestrator.backend.embedded import EmbeddedBackend
from orchestrator.demo import LOST, NUM_BLOCKS, RETRIEVED, STORED, demonstrate, fill, lose, memories, offer, right_bytes
from orchestrator.demo_screen import demonstration
from orchestrator.portal import run_sync
from stages.errors import Reason, Stage
from stages.model import Plan

ROOT = Path(__file__).parent.parent.parent

CONTENT_BYTES = 18 * 1_085_440 + 6 * 4 * 1_114_112
"""Of one worker: a block of state in each of 18 layers, four blocks of 544 tokens in each of 6 layers."""


class Forgetful(EmbeddedBackend):
    """Brings all back but one bit of one byte of one worker's last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.plans: dict[str, Plan] = {}

    async def register(self, plan: Plan) -> str:
        """Register, and remember whose memory to spoil."""
        registration = await super().register(plan)
        self.plans[registration] = plan
        return registration

    def retrieve(self, registration: str, engine_group_id: int, block_ids: Sequence[int], keys: Sequence[Hashable]) -> int:
        """Retrieve, then turn a bit of the first block's last byte."""
        moved = super().retrieve(registration, engine_group_id, block_ids, keys)
        plan = self.plans[registration]
        if (plan.offer.worker.rank, engine_group_id) == (1, 3):
            raw = plan.layers[-1].layer.raw
            pages = raw.shape[0] // NUM_BLOCKS
            raw[block_ids[0] * pages].view(torch.uint8)[-1, -1, -1] ^= 1
        return moved


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the command runs: threads that wait for each other on a busy machine take longer than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_demo_shows_what_the_readme_shows() -> None:
    """What the README prints is what the command prints: the same stages, groups, rules, bytes, refusal and metrics; only
    times and rates differ from run to run."""
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", "demo"], capture_output=True, text=True, check=False, cwd=ROOT, env={"COLUMNS": "100"}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert _timeless(done.stdout) == _timeless((ROOT / "docs" / "demo.txt").read_text()), "COLUMNS=100 kvreg demo > docs/demo.txt"


def test_every_byte_is_back_and_the_bad_worker_is_refused() -> None:
    """Four workers of two layouts come up and keep every byte of their blocks; the fifth is refused by name, with its hint."""
    shown = run_sync(demonstrate)
    assert shown.proven
    assert [worker.right_bytes for worker in shown.workers] == [CONTENT_BYTES] * 4 + [0]
    assert [worker.owned_bytes for worker in shown.workers] == [CONTENT_BYTES] * 4 + [0]
    refused = shown.workers[4]
    assert [(rejection.stage, rejection.reason, rejection.group) for rejection in refused.rejections] == [
        (Stage.VALIDATE, Reason.MAMBA_CACHE_MODE, group) for group in range(3)
    ]
    assert all(list(worker.stage_s) == list(Stage) for worker in shown.workers[:4])
    counted = {(name, labels.get("outcome")): value for name, labels, value in shown.counted if name == "kvreg_runs_total"}
    assert set(counted) == {("kvreg_runs_total", "registered"), ("kvreg_runs_total", "rejected")}


def test_one_wrong_byte_is_seen() -> None:
    """The demo is no show: a backend that turns a single bit of 185 million bytes ends it red."""
    shown = run_sync(partial(demonstrate, Forgetful()))
    assert not shown.proven
    assert [worker.owned_bytes - worker.right_bytes for worker in shown.workers] == [0, 1, 0, 0, 0]
    console = screen.console()
    with console.capture() as captured:
        console.print(demonstration(shown))
    assert "must not be used on this machine" in " ".join(captured.get().split())


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("listed", [True, False])
def test_the_demos_pattern_lies_where_the_engine_reads(layout: str, listed: bool) -> None:
    """Written and compared through the raw tensors: blocks that were not filled do not pass, and overwriting loses all."""
    worker = offer(0, layout, listed_states=listed)
    for group, blocks in STORED.items():
        fill(worker, group, blocks)
    for group, blocks in STORED.items():
        owned, right = right_bytes(worker, group, blocks)
        assert owned == right > 0
        owned, right = right_bytes(worker, group, RETRIEVED[group])
        assert right < owned / 100
    lose(worker)
    assert all(bool((memory == LOST).all()) for memory in memories(worker))


def _timeless(text: str) -> list[list[str]]:
    """The words of each line, with durations blanked; the widths of columns follow them, so spaces do not count."""
    return [re.sub(r"\d+(\.\d+)? ms", "_ ms", line).replace("─", "").split() for line in text.splitlines()]
