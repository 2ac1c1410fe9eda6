"""A real vLLM engine on CPU: a GDN hybrid, prefix caching, its own memory; blocks stored, overwritten and retrieved in its worker."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.models import GDN_HYBRID, write

pytestmark = pytest.mark.engine

START_TIMEOUT_S = 600
"""A stuck engine fails the test; nothing is judged by its speed."""


@pytest.fixture(scope="module", params=[0, 32], ids=["kernel block as the engine's", "kernel block 32"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], Path]:
    """One engine run: the kernel block forced on the attention backend (0: none), what the probe saw, and the snapshot it wrote."""
    folder = tmp_path_factory.mktemp("engine")
    model = write(folder / "model", GDN_HYBRID)
    snapshot = folder / "registration.json"
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PROBE_SNAPSHOT": str(snapshot),
        "PROBE_BLOCKS": str(folder / "blocks.json"),
    }
    if request.param:
        environment["KERNEL_BLOCK_SIZE"] = str(request.param)
    report = folder / "report.json"
    run = [sys.executable, "-m", "tests.engine.run", str(model), str(report)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return request.param, json.loads(report.read_text()), snapshot


def test_every_byte_is_back(engine: tuple[int, dict[str, Any], Path]) -> None:
    """Blocks of every group, overwritten in the engine's memory and retrieved: all bytes of all storages are as before."""
    _, seen, _ = engine
    assert seen["blocks"] > 4
    assert seen["overwritten_bytes"] >= seen["spoiled_bytes"] > seen["overwritten_bytes"] // 2
    assert seen["stored_bytes"] == seen["retrieved_bytes"] >= seen["overwritten_bytes"]
    assert seen["wrong_bytes"] == 0


def test_the_engine_goes_on_over_the_restored_blocks(engine: tuple[int, dict[str, Any], Path]) -> None:
    """The same prompt again hits the engine's own prefix cache, whose bytes are now ours, and answers the same."""
    _, seen, _ = engine
    assert seen["cached_tokens"] > 0
    assert seen["same_tokens"]


def test_each_layer_has_its_rule(engine: tuple[int, dict[str, Any], Path]) -> None:
    """Recurrent state is re-viewed always; attention where its kernel block is smaller than the engine's."""
    kernel, seen, _ = engine
    state = {name: rule for name, rule in seen["rules"].items() if rule and rule.startswith("mamba-")}
    attention = {name: rule for name, rule in seen["rules"].items() if name not in state}
    assert (len(state), len(attention)) == (6, 2)
    if kernel:
        assert seen["tokens_per_block"][0] > kernel
    assert set(attention.values()) == ({"subpaged-attention-view"} if kernel else {None})
    for name in attention:
        assert seen["raw_shapes"][name][0] == 32 * (seen["tokens_per_block"][0] // kernel if kernel else 1)


def test_kvreg_check_accepts_the_registrations_snapshot(engine: tuple[int, dict[str, Any], Path]) -> None:
    """What the worker registered replays to the same answer with no engine: same layers, same rules."""
    _, seen, snapshot = engine
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", "check", "--json", str(snapshot)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert {layer["name"]: layer["rule"] for layer in answer["layers"]} == seen["rules"]
