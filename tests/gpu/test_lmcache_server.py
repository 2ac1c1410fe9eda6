"""CUDA caches registered with a real LMCache server by their IPC handles: stored and loaded by another process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("lmcache", reason="LMCache is not installed")
pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.lmcache.harness import Server, server
from tests.lmcache.worker import CHUNK, Worker, check_blocks_come_back

pytestmark = pytest.mark.gpu


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Server]:
    """An LMCache server that is up."""
    with server(tmp_path, CHUNK) as one:
        yield one


def test_blocks_come_back_from_the_server_byte_for_byte(running: Server) -> None:
    """The server copies my device's blocks out and into other blocks, whole, and no other block changes."""
    worker = Worker(running, "cuda")
    try:
        check_blocks_come_back(worker)
        assert worker.known_to(running)
    finally:
        worker.close()
