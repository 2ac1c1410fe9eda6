"""A worker and its LMCache server through everything that can happen to the server: real server processes, killed for real.

There is no engine behind the worker (tests/lmcache/worker.py), whose start would take longer than all of this.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest

pytest.importorskip("lmcache", reason="LMCache is not installed")

from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from metrics.observer import Outcome
from orchestrator.backend.lmcache import chunk_size_tokens
from orchestrator.pipeline import Settings, register
from orchestrator.portal import run_sync
from orchestrator.recovery import Recovery
from stages.errors import Reason, TransferRefused, TransferUnavailable
from tests.faults import held, interrupted
from tests.lmcache.harness import Server, free_port
from tests.lmcache.worker import CHUNK, LONG_S, Worker, check_blocks_come_back, until
from tests.orchestrator.test_recovery import RUN, Seen

pytestmark = pytest.mark.lmcache


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


@pytest.fixture
def worker(server: Server) -> Iterator[Worker]:
    """A worker that is not registered yet."""
    one = Worker(server)
    yield one
    one.close()


@pytest.fixture
def beside() -> Iterator[Callable[[Callable[[], Any]], "Future[Any]"]]:
    """Run something in a thread beside the test."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit


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
    worker.register()
    seen, adapter = Seen(), worker.adapter
    adapter._reregister_kv_caches_callback = Recovery(worker.backend.resend, RUN, [seen], LONG_S)

    def store() -> Any:
        return worker.store(list(range(CHUNK)), [[1, 2], [3, 4]])

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


def test_a_question_that_was_given_up_stops_no_other_connection(server: Server) -> None:
    """A server that comes and goes after a worker gave it up takes nobody else's connection in this process with it."""
    port = free_port()
    with pytest.raises(TransferUnavailable):
        run_sync(lambda: chunk_size_tokens(f"tcp://127.0.0.1:{port}", 0.3))
    with socket.create_server(("127.0.0.1", port)) as late:
        late.settimeout(3)
        with suppress(TimeoutError):
            late.accept()[0].close()
    client = RequestClientFactory.create(f"tcp://127.0.0.1:{server.port}")
    try:
        assert client.get_chunk_size().result(60) == CHUNK
    finally:
        client.close()


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


def test_cancelling_at_any_await_leaves_nothing_registered(server: Server, worker: Worker) -> None:
    """A shutdown at whichever moment of a registration: neither my worker nor the server holds it, and the next try registers."""

    async def registered(at: int) -> bool:
        with anyio.CancelScope() as scope:
            await interrupted(register(worker.offer, worker.backend, Settings(register_timeout_s=LONG_S)), at, scope)
        return not scope.cancelled_caught

    for awaits in count(1):
        done = run_sync(lambda at=awaits: registered(at))
        assert (worker.adapter.transfer_ctx is not None) == bool(worker.adapter.kv_caches) == done
        until(lambda done=done: worker.known_to(server) == done, "the server holds what the worker does")
        if done:
            break
    assert awaits > 4, "three stages and the answer are waited for"


def test_cancelling_while_the_server_says_nothing_leaves_nothing_registered(server: Server, worker: Worker) -> None:
    """A server that hangs with my request in hand, and comes to again after I have given up, holds nothing of mine."""
    freeze(server)

    async def cancelled(at: int) -> None:
        with anyio.CancelScope() as scope:
            await interrupted(register(worker.offer, worker.backend, Settings(register_timeout_s=LONG_S)), at, scope)
        assert scope.cancelled_caught

    for at in range(1, 12):
        run_sync(lambda at=at: cancelled(at))
        assert worker.adapter.transfer_ctx is None
    assert server.process is not None
    server.process.send_signal(signal.SIGCONT)
    receipt = worker.register()
    run_sync(lambda: worker.backend.unregister(receipt.plan))
    assert not worker.known_to(server)


def test_a_thousand_registrations_leave_nothing_behind(server: Server, worker: Worker) -> None:
    """Sleep and wake for weeks: my engine's process has no thread, descriptor or piece of shared memory more than at the start.

    The server's has: see "What LMCache's CPU server keeps" in docs/operations.md.
    """
    plan = worker.register().plan

    async def cycles(number: int) -> None:
        for _ in range(number):
            await worker.backend.unregister(plan)
            await worker.backend.register(plan)

    run_sync(lambda: cycles(20))
    before = held(os.getpid())
    run_sync(lambda: cycles(1000))
    assert held(os.getpid()) == before
    assert worker.known_to(server)


def test_blocks_come_back_from_the_server_byte_for_byte(server: Server, worker: Worker) -> None:
    """What my engine stored is loaded into other blocks, whole, and no other block changes."""
    check_blocks_come_back(worker)
