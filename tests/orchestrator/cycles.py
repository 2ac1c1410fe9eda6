"""Registrations made and given up, 6,000 of them: `python -m tests.orchestrator.cycles FOLDER` prints what they left behind.

A process of its own, so that every byte is the allocator's to count: those of Python objects and those of tensors.
"""

import ctypes
import gc
import json
import logging
import os
import sys
from pathlib import Path

import torch

from metrics.events import EventObserver, event_logger
from metrics.ledger import Ledger
from metrics.observer import Observer
from metrics.prometheus import PrometheusObserver
from metrics.termination import TerminationLog
from orchestrator.backend.embedded import EmbeddedBackend
from orchestrator.pipeline import Settings, register
from orchestrator.portal import run_sync
from stages.errors import RegistrationRejected
from tests.faults import held
from tests.offers import hybrid

WARM_UP, CYCLES = 5000, 1000
"""The interpreter keeps freed lists, dictionaries and floats for its next ones: the first thousands of cycles fill these stores."""

ALLOCATOR = {"PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "1", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
"""One allocator for everything, and nothing that is free counted as used."""


class _Usage(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def used_bytes() -> int:
    """Bytes that are allocated now, in this whole process."""
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Usage
    usage = mallinfo()
    return int(usage.uordblks + usage.hblkhd)


def tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def main(folder: Path) -> None:
    """Sleep and wake for weeks: every tenth registration is refused, every fiftieth writes a ledger."""
    silent = logging.getLogger("kvreg.tests.silent")
    silent.addHandler(logging.NullHandler())
    silent.propagate = False
    (folder / "termination").touch()
    observers: list[Observer] = [EventObserver(event_logger(silent)), PrometheusObserver(), TerminationLog(folder / "termination")]
    ledger, backend = Ledger(folder, "i", logger=event_logger(silent)), EmbeddedBackend()

    async def cycle(number: int) -> None:
        settings = Settings(observers=[*observers, ledger] if number % 50 == 0 else observers)  # its files are slow
        try:
            receipt = await register(hybrid(mode="none" if number % 10 == 9 else "align"), backend, settings)
        except RegistrationRejected:
            return
        backend.store(receipt.registration, 1, [1], ["key"])
        backend.retrieve(receipt.registration, 1, [2], ["key"])
        await backend.unregister(receipt.plan)

    def cycles(some: range) -> None:
        for number in some:
            run_sync(lambda number=number: cycle(number))

    cycles(range(WARM_UP))
    before, tensors_before, bytes_before = held(os.getpid()), tensors(), used_bytes()
    cycles(range(WARM_UP, WARM_UP + CYCLES))
    left_bytes = used_bytes() - bytes_before
    print(json.dumps({"before": before, "after": held(os.getpid()), "tensors": tensors() - tensors_before, "bytes": left_bytes}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
