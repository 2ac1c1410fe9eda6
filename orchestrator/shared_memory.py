"""The CPU path: KV caches moved into POSIX shared memory, under every view the engine holds.

LMCache's server reads and writes a worker's host memory by mapping a named segment. Its own wrapper moves a tensor by
pointing that one tensor at new memory; the engine's layers keep writing to the old one, and a hit then loads bytes
that nobody computed. Here a whole storage is moved instead: its memory is swapped inside the one object that all
views share, so none of them has to be found. What cannot be moved that way is refused.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from stages.errors import Reason, TransferRefused

SHARED_MEMORY_PATH = "/dev/shm"

_HEADER_BYTES = 64
"""torch keeps a reference count before the first byte of a storage in a named segment."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The named segment a storage lives in: `name` as shm_open takes it, and where the storage's bytes lie in it."""

    name: str
    start_bytes: int
    size_bytes: int


def share(storages: Iterable[torch.UntypedStorage], held: Mapping[str, Iterable[torch.Tensor]]) -> dict[int, Segment]:
    """Move each storage into shared memory, once; the segments by the storage's identity (`_cdata`).

    `held` are the tensors by which the engine reaches its caches, by layer. Each that lay in a moved storage must
    follow it. Raises TransferRefused(SHARED_MEMORY) with the cause; the storages moved before it stay usable.
    """
    segments: dict[int, Segment] = {}
    for storage in storages:
        if storage._cdata not in segments:
            old = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
            segments[storage._cdata] = _share(storage)
            _check_followed(storage, old, held)
    return segments


def _share(storage: torch.UntypedStorage) -> Segment:
    if storage.device.type != "cpu":
        raise _refused(device=str(storage.device))
    if not storage.is_shared():
        free = _free_bytes()
        if free is not None and storage.nbytes() + _HEADER_BYTES > free:
            # Without this check the copy would be killed by SIGBUS, with no word of why.
            raise _refused(needed_bytes=storage.nbytes() + _HEADER_BYTES, free_bytes=free)
    try:
        # Swaps the memory of the storage in place; on a storage that already lives in a named segment it just says which.
        # torch's keeper removes the segment when this process ends, however it ends.
        _, name, size_bytes = storage._share_filename_cpu_()
        segment = Segment(name.decode(), _HEADER_BYTES, int(size_bytes) + _HEADER_BYTES)
        _check_segment(segment)
    except (RuntimeError, OSError) as cause:
        raise _refused(cause=str(cause).splitlines()[0]) from cause
    return segment


def _check_segment(segment: Segment) -> None:
    """The segment must have the size the server will map; another header than expected would shift every byte."""
    path = SHARED_MEMORY_PATH + segment.name
    if os.path.isdir(SHARED_MEMORY_PATH) and os.path.getsize(path) != segment.size_bytes:
        raise OSError(f"segment {segment.name} has {os.path.getsize(path)} bytes, not {segment.size_bytes}")


def _check_followed(storage: torch.UntypedStorage, old: range, held: Mapping[str, Iterable[torch.Tensor]]) -> None:
    """Every tensor of this storage points into its new memory, and none is left in the old."""
    if storage.data_ptr() == old.start:
        return
    for layer, tensors in held.items():
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            if tensor.untyped_storage()._cdata != storage._cdata:
                if tensor.data_ptr() in old:
                    raise _refused(layer=layer, cause="the engine holds this memory by a storage of its own")
            elif tensor.data_ptr() != storage.data_ptr() + tensor.storage_offset() * tensor.element_size():
                raise _refused(layer=layer, cause="the engine's view did not follow its storage")


def _free_bytes() -> int | None:
    """Room left for shared memory; None where nothing says."""
    try:
        room = os.statvfs(SHARED_MEMORY_PATH)
    except OSError:
        return None
    return room.f_bavail * room.f_frsize


def _refused(**facts: str | int) -> TransferRefused:
    return TransferRefused(Reason.SHARED_MEMORY, {"path": SHARED_MEMORY_PATH, **facts})
