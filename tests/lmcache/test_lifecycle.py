"""A worker and its LMCache server through everything that can happen to the server: real server processes, killed for real.

The worker here is LMCache's own adapter with kvreg's backend behind it, as the connector puts them together; there is no
engine, whose start would take longer than all of this.
"""

import json
import logging
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="LMCache is not installed")

import zmq

from metrics.observer import Outcome
from orchestrator.backend.lmcache import LMCacheBackend, chunk_size_tokens
from orchestrator.pipeline import Settings, register
from orchestrator.portal import run_sync
from orchestrator.recovery import Recovery
from stages.errors import Reason, TransferRefused, TransferUnavailable
from stages.model import Receipt
from tests.lmcache.harness import Server
from tests.offers import BLOCK, hybrid
from tests.orchestrator.test_recovery import RUN, Seen

pytestmark = pytest.mark.lmcache

CHUNK = 2 * BLOCK
LONG_S = 600.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server's log goes."""
    return tmp_path_factory.mktemp("lifecycle")


@pytest.fixture(scope="module")
def _one_server(folder: Path) -> Iterator[Server]:
    running = Server(folder / "server.log", CHUNK)
    yield running
    running.stop()


@pytest.fixture
def server(_one_server: Server) -> Iterator[Server]:
    """A server that answers at the start of each test, whatever the test before did to it."""
    if _one_server.process is None:
        _one_server.start()
    yield _one_server
    if _one_server.process is not None:
        _one_server.process.send_signal(signal.SIGCONT)


class Worker:
    """LMCache's worker adapter and kvreg's backend, connected to a server."""

    def __init__(self, server: Server) -> None:
        from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPWorkerAdapter, ParallelStrategy

        self.url = f"tcp://127.0.0.1:{server.port}"
        self.adapter: Any = LMCacheMPWorkerAdapter(
            self.url,
            zmq.Context.instance(),
            "model",
            BLOCK,
            ParallelStrategy(mla_only=False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1),
            extra_config={
                "lmcache.mp.mp_transfer_mode": "lmcache_driven",
                "lmcache.mp.heartbeat_interval": 2,
                "lmcache.mp.mq_timeout": 60,
            },
        )
        self.backend = LMCacheBackend(self.adapter)
        self.offer = hybrid()

    def register(self, timeout_s: float = LONG_S) -> Receipt:
        """The whole pipeline, as the connector runs it."""
        return run_sync(lambda: register(self.offer, self.backend, Settings(register_timeout_s=timeout_s)))

    def known_to(self, server: Server) -> bool:
        """Whether the server says that it holds this worker's caches."""
        with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/status", timeout=60) as answer:
            return str(self.adapter.instance_id) in json.dumps(json.load(answer))


@pytest.fixture
def worker(server: Server) -> Iterator[Worker]:
    """A worker that is not registered yet."""
    one = Worker(server)
    yield one
    one.adapter._mq_timeout = 1
    one.adapter.shutdown()


@pytest.fixture
def beside() -> Iterator[Callable[[Callable[[], Any]], "Future[Any]"]]:
    """Run something in a thread beside the test."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition, generously."""
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)


def freeze(server: Server) -> None:
    """Let the server's kernel sockets go on taking requests while the server itself does nothing."""
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)


def test_a_registration_is_held_by_the_server_and_given_up_before_a_sleep(server: Server, worker: Worker) -> None:
    """The server says it has my caches; before a sleep it lets go of them, after the wake-up it has them again."""
    receipt = worker.register()
    assert worker.known_to(server)
    assert worker.adapter.transfer_ctx is not None
    for _ in range(2):
        run_sync(lambda: worker.backend.unregister(receipt.plan))
        assert not worker.known_to(server)
        assert worker.adapter.transfer_ctx is None
        assert run_sync(lambda: worker.backend.register(receipt.plan)) == receipt.registration
        assert worker.known_to(server)


def test_registering_twice_is_refused_and_the_first_stands(server: Server, worker: Worker) -> None:
    """A second registration of the same worker is told so, and the server goes on serving the first."""
    worker.register()
    with pytest.raises(TransferRefused) as refused:
        worker.register()
    assert refused.value.reason is Reason.ALREADY_REGISTERED
    assert worker.known_to(server)


def test_a_server_restart_is_recovered_from_with_the_same_plan(server: Server, worker: Worker) -> None:
    """The server crashes and comes back empty; the worker registers again by itself, and it is counted."""
    receipt, seen = worker.register(), Seen()
    worker.adapter._reregister_kv_caches_callback = Recovery(worker.backend.resend, RUN, [seen], LONG_S)
    views = dict(worker.adapter.kv_caches)
    worker.adapter._ensure_heartbeat_started()
    server.stop()
    until(lambda: not worker.adapter.is_healthy, "the worker noticed that the server is gone")
    server.start()
    until(lambda: worker.adapter.is_healthy, "the worker is back")
    assert Outcome.REGISTERED in seen.recoveries
    assert worker.known_to(server)
    assert all(views[name] is view for name, view in worker.adapter.kv_caches.items())
    assert list(views) == [layer.layer.name for layer in receipt.plan.layers]


def test_a_restart_between_two_heartbeats_is_recovered_from_too(server: Server, worker: Worker) -> None:
    """The server restarts so fast that no heartbeat misses it; the first rejected transfer brings the worker back."""
    from lmcache.integration.vllm.vllm_multi_process_adapter import LoadStoreOp

    worker.register()
    seen, adapter, numbers = Seen(), worker.adapter, count(1)
    adapter._reregister_kv_caches_callback = Recovery(worker.backend.resend, RUN, [seen], LONG_S)

    def store() -> Any:
        request = f"request-{next(numbers)}"
        operation = LoadStoreOp(token_ids=list(range(CHUNK)), block_ids=[[1, 2], [3, 4]], start=0, end=CHUNK)
        adapter.submit_store_request(request, operation, adapter.create_recorded_event())
        return adapter.store_futures.get(request)

    server.stop()
    server.start()
    until(lambda: store() is None or bool(seen.recoveries), "a rejected store was noticed")
    until(lambda: adapter.is_healthy, "the worker is back")
    assert Outcome.REGISTERED in seen.recoveries
    assert worker.known_to(server)
    until(lambda: (answer := store()) is not None and answer.result(LONG_S), "a store succeeds again")


def test_a_server_that_is_down_at_the_start_is_waited_for_with_word_in_the_log(
    server: Server, beside: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """I start the engine before the server; it says what it waits for, and goes on when the server is there."""
    caplog.set_level(logging.WARNING, "kvreg.lmcache")
    server.stop()
    waiting = beside(lambda: run_sync(lambda: chunk_size_tokens(f"tcp://127.0.0.1:{server.port}", LONG_S)))
    until(lambda: "waiting for the LMCache server" in caplog.text, "the log says what is waited for")
    server.start()
    assert waiting.result(LONG_S) == CHUNK


def test_a_server_that_never_comes_ends_the_wait_with_its_address(server: Server) -> None:
    """A wrong port is named after the time I allowed, not after five minutes of silence."""
    server.stop()
    with pytest.raises(TransferUnavailable) as error:
        run_sync(lambda: chunk_size_tokens(f"tcp://127.0.0.1:{server.port}", 0.3))
    assert error.value.reason is Reason.TRANSFER_UNREACHABLE
    assert str(server.port) in str(error.value)


def test_a_server_that_takes_the_plan_and_never_answers_ends_in_a_timeout(server: Server, worker: Worker) -> None:
    """A hung server costs the time I allowed; then the worker says so, holds nothing, and can register later."""
    freeze(server)
    with pytest.raises(TransferUnavailable) as error:
        worker.register(timeout_s=0.5)
    assert error.value.reason is Reason.TRANSFER_TIMEOUT
    assert worker.adapter.transfer_ctx is None
    assert worker.adapter.kv_caches == {}
    assert server.process is not None
    server.process.send_signal(signal.SIGCONT)
    worker.register()
    assert worker.known_to(server)


def test_a_server_that_dies_with_the_plan_in_hand_is_sent_it_again(
    server: Server, worker: Worker, beside: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The server dies in the middle of my registration; the next server gets it, within the same start."""
    caplog.set_level(logging.WARNING, "kvreg.lmcache")
    freeze(server)
    registering = beside(worker.register)
    until(lambda: "no answer from the LMCache server yet" in caplog.text, "a first request was sent and not answered")
    server.stop()
    server.start()
    registering.result(LONG_S)
    assert worker.known_to(server)


def test_stopping_in_the_middle_of_a_registration_ends_it(server: Server, worker: Worker, beside: Any) -> None:
    """I stop an engine that is stuck registering, and it stops."""
    freeze(server)
    sent = threading.Event()
    submit = worker.adapter.req_client.register_kv_cache

    def noted(*arguments: Any) -> Any:
        answer = submit(*arguments)
        sent.set()
        return answer

    worker.adapter.req_client.register_kv_cache = noted
    registering = beside(worker.register)
    assert sent.wait(LONG_S)
    worker.backend.close()
    with pytest.raises(TransferRefused) as refused:
        registering.result(LONG_S)
    assert refused.value.reason is Reason.SHUTTING_DOWN
    assert worker.adapter.transfer_ctx is None
