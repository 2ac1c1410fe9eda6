"""The zoo's answers: block sizes as vLLM's platforms for GPUs compute them, and the page of all models, which is current."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.zoo.__main__ import COLUMNS

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parent.parent.parent

TIMEOUT_S = 600
"""A stuck plan fails the test; nothing is judged by its speed."""

BLOCKS = {
    ("qwen3.5-0.8b", 1): 544,
    ("qwen3.5-0.8b", 4): 272,
    ("nemotron-h-8b", 1): 1040,
    ("granite-4.0-h-small", 1): 528,
    ("falcon-h1-7b", 1): 1568,
    ("jamba-1.5-mini", 1): 80,
}
"""The logical block of a model on so many ranks, as engines on GPUs with FlashAttention have logged it."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `make zoo` would write now."""
    file = tmp_path_factory.mktemp("zoo") / "models.md"
    subprocess.run([sys.executable, "-m", "tests.zoo", str(file)], cwd=ROOT, capture_output=True, check=True, timeout=TIMEOUT_S)
    return file.read_text(encoding="utf-8")


def preflight(model: str, target: str) -> dict[str, Any]:
    """`kvreg preflight --json` of a model of the zoo, in a process of its own: one plans for one machine."""
    command = [sys.executable, "-m", "orchestrator.cli", "preflight", str(ROOT / "tests" / "zoo" / model), "--assume", target, "--json"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize(("model", "ranks"), BLOCKS)
def test_a_hybrids_logical_block_is_the_gpu_platforms(model: str, ranks: int, page: str) -> None:
    """Attention's block is inflated until its page covers the recurrent state, in steps of the backend's kernel block."""
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in page.splitlines() if line.startswith(f"| {model} ")]
    (row,) = [dict(zip(COLUMNS, row, strict=True)) for row in rows if str(ranks) in row[COLUMNS.index("ranks")].split(", ")]
    assert (row["served"], row["logical block"], row["smallest chunk"]) == ("yes", str(BLOCKS[model, ranks]), str(BLOCKS[model, ranks]))


@pytest.mark.parametrize(("target", "backend"), [("cuda-sm90", "FLASH_ATTN"), ("rocm-gfx942", "TRITON_ATTN")])
def test_each_machine_is_planned_with_its_own_backend(target: str, backend: str) -> None:
    """vLLM's platform for the machine chooses, and every rule and proof is run on what it chose."""
    answer = preflight("qwen3-next-80b-a3b", target)
    assert answer["outcome"] == "accepted"
    assert backend in {name for worker in answer["workers"] for group in worker["groups"] for name in group["attention_backends"]}


def test_another_machine_splits_the_block_otherwise() -> None:
    """On a Blackwell the same model is paged by FlashInfer's kernel blocks, and the answer says that this is assumed."""
    answer = preflight("qwen3-next-80b-a3b", "cuda-sm100")
    attention = [group for worker in answer["workers"] for group in worker["groups"] if "FLASHINFER" in group["attention_backends"]]
    assert attention
    assert all(group["kernel_block_tokens"] < group["logical_block_tokens"] for group in attention)
    marks = {line["name"]: line["certain"] for line in answer["lines"]}
    assert (marks["architecture"], marks["attention backends"]) == (True, False)


def test_the_page_of_models_is_current(page: str) -> None:
    """docs/models.md is what `make zoo` would write."""
    assert (ROOT / "docs" / "models.md").read_text(encoding="utf-8") == page
