"""Worker processes that register, or are refused and killed at once, as an engine's are.

    python -m tests.observability.workers LEDGER_DIR MODEL:OUTCOME:COUNT…

OUTCOME is one of registered, rejected, failed, bypassed; the model's name is its engine's as well. Each worker is a
process of its own, writes the ledger through the real pipeline and observer, and is ended by SIGKILL the moment its
outcome is known. All begin together. Prints the Unix time at which they began.
"""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import anyio

from metrics.ledger import Ledger
from metrics.observer import Run
from orchestrator.backend.embedded import EmbeddedBackend
from orchestrator.pipeline import Settings, register
from stages.errors import KVRegError, Reason, TransferRefused
from stages.model import Plan
from tests.offers import hybrid


class RefusingBackend:
    """A server that says no."""

    name = "refusing"

    async def register(self, plan: Plan) -> str:
        """Refuse."""
        raise TransferRefused(Reason.TRANSFER_REFUSED, {"words": "no room"})

    async def unregister(self, plan: Plan) -> None:
        """Nothing to take back."""


def work(directory: Path, model_name: str, outcome: str, rank: int, begin: int) -> NoReturn:
    """One worker's life."""
    ledger = Ledger(directory, model_name)
    offer = replace(hybrid(rank=rank, mode="none" if outcome in ("rejected", "bypassed") else "align"), model_name=model_name)
    backend = RefusingBackend() if outcome == "failed" else EmbeddedBackend()
    os.read(begin, 1)
    try:
        anyio.run(register, offer, backend, Settings(observers=(ledger,)))
    except KVRegError as refusal:
        if outcome == "bypassed":
            ledger.bypassed(Run("bypassed", model_name, "worker", str(rank)), refusal)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def main(directory: str, *engines: str) -> None:
    """Start the workers, let all begin at once, and see each of them killed."""
    begin, let_begin = os.pipe()
    children = []
    for model_name, outcome, count in (engine.split(":") for engine in engines):
        for rank in range(int(count)):
            child = os.fork()
            if child == 0:
                os.close(let_begin)
                work(Path(directory), model_name, outcome, rank, begin)
            children.append(child)
    print(time.time(), flush=True)
    os.close(let_begin)
    ends = {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
    if ends != {-signal.SIGKILL}:
        sys.exit(f"workers ended with {ends}, not by SIGKILL")


if __name__ == "__main__":
    main(*sys.argv[1:])
