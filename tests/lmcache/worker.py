"""LMCache's own adapters with kvreg's backend behind them, as the connector puts them together; the engine is missing.

Its blocks are filled and compared here instead, on whatever device the offer lies.
"""

import json
import time
import urllib.request
from collections.abc import Callable
from itertools import count
from typing import Any

import zmq
from lmcache.integration.vllm.vllm_multi_process_adapter import (
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
    ParallelStrategy,
)

from orchestrator.backend.lmcache import LMCacheBackend
from orchestrator.pipeline import Settings, register
from orchestrator.portal import run_sync
from stages.model import Receipt
from tests.lmcache.harness import Server
from tests.offers import BLOCK, block_bytes, fill, hybrid

CHUNK = 2 * BLOCK
LONG_S = 600.0

_EXTRA = {"lmcache.mp.mp_transfer_mode": "lmcache_driven", "lmcache.mp.heartbeat_interval": 2, "lmcache.mp.mq_timeout": 60}

_REQUESTS = count(1)


class Worker:
    """A worker, and the scheduler beside it, connected to a server."""

    def __init__(self, server: Server, device: str = "cpu") -> None:
        self.url = f"tcp://127.0.0.1:{server.port}"
        # A context of its own: what a worker leaves behind when its server is gone is nobody else's.
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self.adapter: Any = LMCacheMPWorkerAdapter(self.url, *self._arguments, extra_config=_EXTRA)
        self.backend = LMCacheBackend(self.adapter)
        self.offer = hybrid(device=device)

    @property
    def _arguments(self) -> tuple[Any, ...]:
        alone = ParallelStrategy(mla_only=False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1)
        return self._context, "model", BLOCK, alone

    def register(self, timeout_s: float = LONG_S) -> Receipt:
        """The whole pipeline, as the connector runs it."""
        return run_sync(lambda: register(self.offer, self.backend, Settings(register_timeout_s=timeout_s)))

    def known_to(self, server: Server) -> bool:
        """Whether the server says that it holds this worker's caches."""
        with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/status", timeout=60) as answer:
            return str(self.adapter.instance_id) in json.dumps(json.load(answer))

    def store(self, tokens: list[int], blocks: list[list[int]]) -> Any:
        """Ask for a chunk to be stored from these blocks of each group; the answer to come, None if it was dropped."""
        request = f"store-{next(_REQUESTS)}"
        operation = LoadStoreOp(token_ids=tokens, block_ids=blocks, start=0, end=len(tokens))
        self.adapter.submit_store_request(request, operation, self.adapter.create_recorded_event())
        return self.adapter.store_futures.get(request)

    def retrieve(self, tokens: list[int], blocks: list[list[int]]) -> None:
        """Look a chunk up and load it into these blocks of each group."""
        request = f"retrieve-{next(_REQUESTS)}"
        scheduler: Any = LMCacheMPSchedulerAdapter([self.url], *self._arguments, extra_config=_EXTRA)
        try:
            scheduler.maybe_submit_lookup_request(request, tokens)
            until(lambda: scheduler.check_lookup_result(request) is not None, "the lookup was answered")
            assert scheduler.check_lookup_result(request) == len(tokens)
            operation = LoadStoreOp(token_ids=tokens, block_ids=blocks, start=0, end=len(tokens))
            self.adapter.submit_retrieve_request(request, operation, self.adapter.create_recorded_event())
            until(lambda: request in (self.adapter.get_finished(set())[1] or ()), "the blocks were loaded")
            assert self.adapter.get_block_ids_with_load_errors() == set()
        finally:
            scheduler.shutdown()

    def close(self) -> None:
        """End it, whether or not the server still answers."""
        self.adapter._mq_timeout = 1
        self.adapter.shutdown()
        self._context.destroy(linger=0)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition, generously."""
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)


def check_blocks_come_back(worker: Worker) -> None:
    """Store a chunk of each group, overwrite everything, load it into other blocks: their bytes are back, no others touched.

    Of recurrent state only a chunk's last block is worth loading, and only that is loaded.
    """
    worker.register()
    tokens, stored, loaded = list(range(CHUNK)), [[1, 2], [3, 4]], [[3, 4], [2, 1]]
    fill(worker.offer, 1)
    state, attention = block_bytes(worker.offer, 0, 2), [block_bytes(worker.offer, 1, block) for block in stored[1]]
    answer = worker.store(tokens, stored)
    assert answer is not None
    assert answer.result(LONG_S)
    fill(worker.offer, 2)
    untouched = {block: block_bytes(worker.offer, 1, block) for block in (0, 3, 5)}
    worker.retrieve(tokens, loaded)
    assert block_bytes(worker.offer, 0, 4) == state
    assert [block_bytes(worker.offer, 1, block) for block in loaded[1]] == attention
    assert {block: block_bytes(worker.offer, 1, block) for block in untouched} == untouched
