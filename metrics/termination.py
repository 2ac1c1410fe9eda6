"""Why a container died, where Kubernetes looks for it.

The last lines of an engine's output do not hold the cause of a refused registration; the termination log does, and
`kubectl describe pod` prints it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from metrics.observer import Outcome, Run, StageResult
from stages.errors import Stage

TERMINATION_LOG = Path("/dev/termination-log")
LIMIT_BYTES = 4096
"""What Kubernetes reads of it."""


class TerminationLog:
    """Appends the one line of a run that was refused or failed to `path`, if that file exists; it is never created.

    Workers of one container share the file: a line that another worker has written is not repeated.
    """

    def __init__(self, path: str | Path = TERMINATION_LOG) -> None:
        self._path = path
        self._written = b""

    def started(self, run: Run) -> None:
        """Nothing to say yet."""

    def stage_finished(self, run: Run, stage: Stage, duration_s: float, result: StageResult) -> None:
        """Nothing to say yet."""

    def finished(self, run: Run, outcome: Outcome, cause: BaseException | None) -> None:
        """Write why. Raises OSError where the file is there but cannot be written."""
        if outcome not in {Outcome.REJECTED, Outcome.FAILED}:
            return
        line = (" ".join(str(cause).split()) + "\n").encode("utf-8", "backslashreplace")
        with self._opened() as file:
            before = file.read(LIMIT_BYTES) if file else b""
            if file and line not in before:
                self._written = line[: LIMIT_BYTES - len(before)]
                file.write(self._written)

    def recovered(self, run: Run, outcome: Outcome) -> None:
        """Nothing to say: the engine lives."""

    def bypassed(self, run: Run, cause: BaseException) -> None:
        """Take the line back, if it is still the last: the engine lives, and may die of something else."""
        with self._opened() as file:
            said = file.read(LIMIT_BYTES) if file and self._written else b""
            if file and said.endswith(self._written):
                file.truncate(len(said) - len(self._written))

    @contextmanager
    def _opened(self) -> Iterator[FileIO | None]:
        """The file, at its start, every write to its end; None if there is none."""
        try:
            file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            yield None
            return
        with os.fdopen(file, "r+b", buffering=0) as opened:
            yield opened
