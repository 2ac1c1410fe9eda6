"""A connector and a worker extension that run the real pipeline, on the embedded backend, inside a real vLLM worker.

The connector moves nothing by itself: it registers what the engine hands it, and remembers which block ids a finished
request had. The worker extension then stores those blocks, overwrites them in the engine's own memory, retrieves them,
and compares every byte by way of the raw tensors.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch

from orchestrator import snapshot
from orchestrator.backend.embedded import EmbeddedBackend
from orchestrator.engine.observe import observe
from orchestrator.pipeline import register
from orchestrator.portal import run_sync
from stages.model import Receipt
from tests.lmcache.idle import IdleConnector

FINISHED = Path(os.environ["PROBE_BLOCKS"])
"""Block ids of the last finished request, one list a group: the scheduler's connector tells the worker's, in another process."""

REGISTERED: list["Probe"] = []
"""The worker's connector, once it has registered."""


if "KERNEL_BLOCK_SIZE" in os.environ:
    import tests.lmcache.subpaged  # noqa: F401 - pages attention by a smaller kernel block


class Probe(IdleConnector):
    """Registers with the embedded backend and transfers nothing on its own."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.vllm_config = vllm_config
        self.kv_cache_config = kv_cache_config
        self.backend = EmbeddedBackend()
        self.receipt: Receipt | None = None
        self.kv_caches: dict[str, Any] = {}

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The four stages, from vLLM's own thread."""
        offer = observe(self.kv_cache_config, kv_caches, vllm_config=self.vllm_config)
        snapshot.write(offer, Path(os.environ["PROBE_SNAPSHOT"]))
        self.receipt = run_sync(lambda: register(offer, self.backend))
        self.kv_caches = kv_caches
        REGISTERED.append(self)

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        FINISHED.write_text(json.dumps([list(ids) for ids in block_ids]))
        return False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))


class ProbeWorker:
    """Methods that vLLM adds to its worker (`worker_extension_cls`), called by `collective_rpc`."""

    def probe_plan(self) -> dict[str, Any]:
        """What was registered: each layer's rule, raw and view shape, and each group's tokens per block."""
        plan = REGISTERED[-1].receipt.plan
        return {
            "rules": {layer.layer.name: layer.rule for layer in plan.layers},
            "raw_shapes": {layer.layer.name: list(layer.layer.raw.shape) for layer in plan.layers},
            "tokens_per_block": [group.tokens_per_block for group in plan.groups],
        }

    def probe_round_trip(self) -> dict[str, int]:
        """Store the last finished request's blocks of every group, overwrite them, retrieve them, compare every byte."""
        probe = REGISTERED[-1]
        blocks = [[block_id for block_id in ids if block_id != 0] for ids in json.loads(FINISHED.read_text())]
        registration = probe.receipt.registration
        before = _memory(probe)
        _check_not_blank(probe, blocks)
        stored = sum(probe.backend.store(registration, group, ids, ids) for group, ids in enumerate(blocks))
        overwritten = sum(_overwrite(probe, group, ids) for group, ids in enumerate(blocks))
        spoiled = _differing(before, _memory(probe))
        retrieved = sum(probe.backend.retrieve(registration, group, ids, ids) for group, ids in enumerate(blocks))
        return {
            "blocks": sum(map(len, blocks)),
            "stored_bytes": stored,
            "overwritten_bytes": overwritten,
            "spoiled_bytes": spoiled,
            "retrieved_bytes": retrieved,
            "wrong_bytes": _differing(before, _memory(probe)),
        }


def _rows(probe: Probe, group: int, block_id: int) -> list[torch.Tensor]:
    """The raw tensors' rows of one block, by the engine's own rule: kernel page `n*r + i` is part `i` of block `n`."""
    rows = []
    for name in probe.kv_cache_config.kv_cache_groups[group].layer_names:
        cache = probe.kv_caches[name]
        for tensor in cache if isinstance(cache, list) else [cache]:
            ratio = tensor.shape[0] // probe.kv_cache_config.num_blocks
            rows.append(tensor[block_id * ratio : (block_id + 1) * ratio])
    return rows


def _check_not_blank(probe: Probe, blocks: list[list[int]]) -> None:
    """A round trip of zeros proves nothing: the generation must have written every block's every layer."""
    for group, ids in enumerate(blocks):
        for block_id in ids:
            assert all(bool(rows.ne(0).any()) for rows in _rows(probe, group, block_id)), (group, block_id)


def _overwrite(probe: Probe, group: int, block_ids: list[int]) -> int:
    """Fill the blocks with noise through the raw tensors; the bytes written."""
    written = 0
    for block_id in block_ids:
        for rows in _rows(probe, group, block_id):
            noise = torch.randint(1, 120, (rows.numel() * rows.element_size(),), dtype=torch.uint8)
            rows.copy_(noise.view(rows.dtype).view(rows.shape))
            written += noise.numel()
    return written


def _memory(probe: Probe) -> dict[int, torch.Tensor]:
    """A copy of every storage the engine registered, whole: bytes of other blocks must not change either."""
    storages = {}
    for cache in probe.kv_caches.values():
        for tensor in cache if isinstance(cache, list) else [cache]:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in storages:
                storages[storage.data_ptr()] = torch.tensor([], dtype=torch.uint8).set_(storage).clone()
    return storages


def _differing(one: dict[int, torch.Tensor], other: dict[int, torch.Tensor]) -> int:
    return sum(int(one[place].ne(other[place]).sum()) for place in one)
