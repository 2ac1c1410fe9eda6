"""What a preflight plans is what a real engine registers: group by group, stride by stride, with the same flags."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.snapshot import read
from stages.model import CacheTensor, Offer
from tests.engine.models import GDN_HYBRID, write
from tests.lmcache.models import LLAMA, MLA, SLIDING_WINDOW

pytestmark = pytest.mark.engine

START_TIMEOUT_S = 600
"""A stuck engine fails the test; nothing is judged by its speed."""

CONNECTOR = {"kv_connector": "Registered", "kv_connector_module_path": "tests.engine.registered", "kv_role": "kv_both"}

FLAGS = (
    "--load-format=dummy",
    "--skip-tokenizer-init",
    "--enforce-eager",
    "--dtype=bfloat16",
    "--max-model-len=2048",
    "--max-num-batched-tokens=2048",
    "--max-num-seqs=2",
    "--num-gpu-blocks-override=160",
    "--enable-prefix-caching",
    "--kv-transfer-config",
    json.dumps(CONNECTOR),
)

CASES: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "recurrent and full attention": (GDN_HYBRID, ("--mamba-cache-mode=align",)),
    "full attention on two ranks": (LLAMA, ("--tensor-parallel-size=2",)),
    "sliding windows": (SLIDING_WINDOW, ()),
    "latent attention": (MLA, ()),
}


@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_what_the_engine_registers(case: str, tmp_path: Path) -> None:
    """Specs, groups, blocks, layout, and every tensor's shape, stride and place: the snapshots are equal for every worker."""
    config, flags = CASES[case]
    model = write(tmp_path / "model", config)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if "--tensor-parallel-size=2" in flags:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    environment["REGISTERED_SNAPSHOTS"] = str(tmp_path)
    run(["tests.engine.start", "--model", str(model), *FLAGS, *flags], environment)
    run(["orchestrator.cli", "preflight", str(model), "--snapshot", str(tmp_path / "planned.json"), *FLAGS, *flags], environment)

    registered = {int(path.stem.removeprefix("rank")): read(path) for path in tmp_path.glob("rank*.json")}
    planned = {offer.worker.rank: offer for offer in map(read, tmp_path.glob("planned*.json"))}
    assert planned.keys() == registered.keys() != set()
    for rank, offer in registered.items():
        assert planned[rank].groups == offer.groups
        assert told(planned[rank]) == told(offer)


def run(module: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *module], env=environment, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


def told(offer: Offer) -> dict[str, object]:
    """All of an offer but its groups, with storages numbered by their first layer: a snapshot's own names are addresses."""
    storages = list(dict.fromkeys(part.storage for cache in offer.caches.values() for part in cache.tensors))
    return {
        "engine": offer.engine,
        "layout": offer.layout,
        "dcp_size": offer.dcp_size,
        "model_name": offer.model_name,
        "worker": offer.worker,
        "caches": [(name, cache.listed, [tensor(part, storages) for part in cache.tensors]) for name, cache in offer.caches.items()],
    }


def tensor(part: CacheTensor, storages: list[str]) -> tuple[object, ...]:
    view = part.tensor
    return storages.index(part.storage), part.storage_size_bytes, view.dtype, *view.shape, view.stride(), view.storage_offset()
