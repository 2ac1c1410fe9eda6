"""Moving KV caches into shared memory, under every view of them."""

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from orchestrator import shared_memory
from orchestrator.shared_memory import Segment, share
from stages.errors import Reason, TransferRefused


def mapped(segment: Segment) -> mmap.mmap:
    """The segment as another process would map it, by name."""
    with open(shared_memory.SHARED_MEMORY_PATH + segment.name, "r+b") as file:
        return mmap.mmap(file.fileno(), segment.size_bytes)


@pytest.fixture
def memory() -> torch.Tensor:
    """A page-sized buffer of counting bytes."""
    return torch.arange(4096, dtype=torch.int32).to(torch.uint8)


def test_every_view_follows_into_the_segment_and_the_segment_is_the_memory(memory: torch.Tensor) -> None:
    """What a layer writes through a view it already held, the server reads, and the other way round."""
    pages = memory.view(torch.bfloat16).view(4, 2, 16, 16)
    strided = memory.as_strided((4, 100), (1024, 1), 24)
    before = memory.clone()
    segment = share([memory.untyped_storage()], {"l.0": [pages], "l.1": [strided]})[memory.untyped_storage()._cdata]
    there = mapped(segment)
    assert memory.equal(before)
    assert there[segment.start_bytes : segment.start_bytes + 4096] == bytes(before.numpy())
    strided[1, 3] = 77
    assert there[segment.start_bytes + 24 + 1024 + 3] == 77
    there[segment.start_bytes + 24] = 99
    assert int(strided[0, 0]) == 99
    assert pages.data_ptr() == memory.data_ptr()
    there.close()


def test_a_storage_is_moved_once(memory: torch.Tensor) -> None:
    """Registering again, after a sleep or a restart of the server, finds the memory where it was."""
    storage = memory.untyped_storage()
    first = share([storage, memory.view(64, 64).untyped_storage()], {})
    place = memory.data_ptr()
    assert share([storage], {}) == first
    assert memory.data_ptr() == place


def test_memory_that_a_layer_holds_by_another_storage_is_refused(memory: torch.Tensor) -> None:
    """A layer that would go on writing to the old memory is named, instead of hits that load nothing."""
    apart = torch.from_numpy(memory.numpy())
    assert apart.data_ptr() == memory.data_ptr()
    with pytest.raises(TransferRefused) as refused:
        share([memory.untyped_storage()], {"l.7": [apart]})
    assert (refused.value.reason, refused.value.facts["layer"]) == (Reason.SHARED_MEMORY, "l.7")


def test_too_little_room_is_refused_before_a_byte_is_copied(memory: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with a small /dev/shm gets a sentence with both numbers, not a bus error."""
    monkeypatch.setattr(shared_memory.os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=4096))
    place = memory.data_ptr()
    with pytest.raises(TransferRefused) as refused:
        share([memory.untyped_storage()], {})
    assert (refused.value.facts["needed_bytes"], refused.value.facts["free_bytes"]) == (4160, 4096)
    assert memory.data_ptr() == place
    assert "/dev/shm" in str(refused.value)


def test_memory_that_is_not_the_hosts_is_refused() -> None:
    """Only host memory can be shared this way."""
    with pytest.raises(TransferRefused):
        share([torch.empty(8, device="meta").untyped_storage()], {})


def test_a_killed_process_leaves_no_segment_behind(tmp_path: Path) -> None:
    """An engine that was killed does not leave its caches in /dev/shm for ever."""
    program = (
        "import os, signal, torch; from orchestrator.shared_memory import share\n"
        "memory = torch.zeros(4096, dtype=torch.uint8)\n"
        "segment, = share([memory.untyped_storage()], {}).values()\n"
        "print(segment.name, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    killed = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    path = shared_memory.SHARED_MEMORY_PATH + killed.stdout.strip()
    # torch's keeper removes it when it notices the closed socket.
    deadline = time.monotonic() + 120
    while os.path.exists(path):
        assert time.monotonic() < deadline, f"{path} is still there"
        time.sleep(0.05)
