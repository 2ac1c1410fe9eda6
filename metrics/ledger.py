"""Counts that outlive the worker: a text file per worker, which the worker's next start goes on from.

A refused registration ends its worker within milliseconds, before anything could scrape it; and a counter that starts
at 1 after every crash never increases. So each worker keeps `kvreg-<instance>-<worker id>.prom` in a directory that a
stock node_exporter serves (`--collector.textfile.directory`), reads its own old values back from it, and writes it
before the refusal is raised.

- The file is written aside and renamed: a reader sees the old text or the new, never a part. What went wrong is flushed to
  disk first, so that not even a power cut loses it; that a run began, or registered, is the kernel's to write when it likes.
- One process writes a file, held by a lock beside it (`….lock`, flock, let go with the process, however it ends). One
  that comes second counts nothing away: it logs, and tries again at its next write.
- A file that is not ours to read on is put aside as `….prom.broken`, and counting starts at zero.
- Nothing here changes an outcome: what fails is logged as `ledger.write_failed`, and the file keeps its old text.
- Values are kept by `Series`, not by prometheus-client's process-wide store, so PROMETHEUS_MULTIPROC_DIR changes nothing.

Engines that share a directory (one node_exporter for several replicas on a host) need an instance each, and worker ids
that differ: of two files with the same labels node_exporter serves one, and reports no error. So a run takes over what
a dead instance left of the same worker, and one that meets a living one logs it.
"""

import errno
import fcntl
import os
import re
import socket
import stat
import time
import zlib
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from threading import RLock

from structlog.stdlib import BoundLogger

from metrics.catalogue import RULE_NAMES, Worker, worker_of
from metrics.events import event_logger
from metrics.observer import Outcome, Run, StageResult
from metrics.series import Series, worker_of_text
from metrics.tally import Clock, Tally, declare
from stages.errors import Stage

LARGEST_LEDGER_BYTES = 4 * 1024 * 1024
"""More than a worker's every series takes many times over; a larger file is not ours."""

WORKER_ROLE = "worker"
"""The role that is not named in a ledger's file name."""

_NAME_CHARACTERS = 80
_HEAD_BYTES = 4096


@lru_cache(maxsize=64)
def ledger_path(directory: str | Path, instance: str, worker: Worker) -> Path:
    """Where a worker's ledger lies; one with another role than "worker" may have a worker's id, and has a file of its own.

    Characters that do not belong in a file name are replaced, and what they replaced told apart by a checksum.
    """
    name = worker.worker_id if worker.role == WORKER_ROLE else f"{worker.role}-{worker.worker_id}"
    return Path(directory) / f"kvreg-{_file_name(instance)}-{_file_name(name)}.prom"


def default_instance() -> str:
    """The host's name: in Kubernetes the pod's, which stays while its containers restart."""
    return socket.gethostname()


@dataclass(slots=True)
class _Book:
    """One worker's ledger in this process: its values, and the lock on its file once this process is the one to write it."""

    path: Path
    series: Series
    lock: int | None = None
    texts: list[int] = field(default_factory=list)
    """The last two texts' files, open: a file system may let go of a replaced text's pages only once they are on disk."""


_books: dict[Path, _Book] = {}
"""This process' ledgers. Not a Ledger's own: an engine that is started again in the same process goes on writing them."""

_guard = RLock()


class Ledger:
    """An observer that keeps each run's worker a ledger in `directory`, which is created if it can be.

    `instance` tells engines apart that share a directory; by default the host's name.
    """

    def __init__(
        self,
        directory: str | Path,
        instance: str | None = None,
        rules: Collection[str] = RULE_NAMES,
        clock: Clock = time.time,
        logger: BoundLogger | None = None,
    ) -> None:
        self._directory = Path(directory).absolute()
        self._instance = instance or default_instance()
        self._rules = rules
        self._clock = clock
        self._log = logger or event_logger()
        _watch_forks()

    def started(self, run: Run) -> None:
        """Go on from the worker's ledger, and write that a run has started."""
        self._count(run, lambda tally: tally.started(run))

    def stage_finished(self, run: Run, stage: Stage, duration_s: float, result: StageResult) -> None:
        """Count; written when the run ends."""
        self._count(run, lambda tally: tally.stage_finished(run, stage, duration_s, result), write=False)

    def finished(self, run: Run, outcome: Outcome, cause: BaseException | None) -> None:
        """Write how the run ended, before its error is raised."""
        self._count(run, lambda tally: tally.finished(run, outcome, cause), flush=outcome is not Outcome.REGISTERED)

    def recovered(self, run: Run, outcome: Outcome) -> None:
        """Write that a plan was sent again."""
        self._count(run, lambda tally: tally.recovered(run, outcome), flush=outcome is not Outcome.REGISTERED)

    def bypassed(self, run: Run, cause: BaseException) -> None:
        """Write that the engine serves on without this worker's registration."""
        self._count(run, lambda tally: tally.bypassed(run, cause), flush=True)

    def declare(self, workers: Iterable[Worker]) -> None:
        """Write the workers' series before any of them runs, so that a first refusal is an increase.

        What their ledgers hold is kept, whoever's it is, except what was registered: nothing is, yet. A ledger that is
        being written belongs to a worker that runs already, and is left alone.
        """
        for worker in workers:
            self._prepare(ledger_path(self._directory, self._instance, worker), worker)

    def declare_found(self) -> int:
        """The same for this instance's ledgers that exist, for the workers they name; returns how many ledgers there are."""
        first = ledger_path(self._directory, self._instance, Worker("", WORKER_ROLE, "")).name.removesuffix(".prom")
        found = [path for path in sorted(self._directory.glob("kvreg-*.prom")) if path.name.startswith(first)]
        for path in found:
            self._prepare(path, None)
        return len(found)

    def close(self) -> None:
        """Let other processes write this directory's ledgers. The files stay, and the next run opens them again."""
        with _guard:
            for path in [path for path in _books if path.parent == self._directory]:
                _close(_books.pop(path))

    def _count(self, run: Run, count: Callable[[Tally], None], *, write: bool = True, flush: bool = False) -> None:
        worker = worker_of(run)
        path = ledger_path(self._directory, self._instance, worker)
        with _guard:
            book = _books.setdefault(path, _Book(path, Series()))
            count(Tally(book.series, self._rules, self._clock))
            if write:
                self._write(book, worker, run, flush=flush)

    def _prepare(self, path: Path, worker: Worker | None) -> None:
        with _guard:
            if path in _books:
                return
            book = _Book(path, Series())
            if worker is not None:
                declare(book.series, worker)
            self._write(book, worker, None, flush=False)
            _close(book)

    def _write(self, book: _Book, worker: Worker | None, run: Run | None, *, flush: bool) -> None:
        """The book's values into its file, or a line in the log. At the first write the file's own values come in."""
        try:
            if book.lock is None:
                book.lock = _locked(book.path)
                self._resume(book, worker, run)
            book.texts.append(_write_aside(book.path, book.series.text(), flush=flush))
            if len(book.texts) > 2:
                os.close(book.texts.pop(0))
        except OSError as failure:
            if run is not None or not isinstance(failure, BlockingIOError):
                self._log.error("ledger.write_failed", **_about(book.path, worker, run), **_failure(failure))

    def _resume(self, book: _Book, worker: Worker | None, run: Run | None) -> None:
        """Add the file's values to the book's, which has only what happened since this process began.

        A run has its worker's ledger to itself: what another model left there would be served for ever. Before a run
        it is not known yet whose series will go on.
        """
        about = _about(book.path, worker, run)
        try:
            taken = book.series.resume(_read(book.path), self._clock())
            dropped = book.series.keep_only(worker) if run is not None and worker is not None else 0
            self._log.info("ledger.resumed", **about, series=taken, dropped_series=dropped)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as failure:
            self._log.warning("ledger.resumed", **about, series=0, **_failure(failure))
            os.replace(book.path, book.path.with_name(book.path.name + ".broken"))
        if run is not None and worker is not None:
            self._adopt(book, worker, run)
        for other in book.series.workers():
            declare(book.series, other)

    def _adopt(self, book: _Book, worker: Worker, run: Run) -> None:
        """Take over what another instance left of the same worker: two files of one worker, and a reader drops the second.

        That is a pod of another name that wrote to the same host. An instance that still lives keeps its file; then
        one of the two is not seen, and the log says so.
        """
        for path in sorted(self._directory.glob("kvreg-*.prom")):
            if path == book.path or _worker_of_file(path) != Worker(*worker.label_values):
                continue
            try:
                lock = _locked(path)
            except BlockingIOError:
                self._log.error("ledger.write_failed", **_about(path, worker, run), error_type="WorkerIdTaken")
                continue
            try:
                taken = book.series.resume(_read(path), self._clock())
                path.unlink()
                path.with_suffix(".lock").unlink(missing_ok=True)
                self._log.info("ledger.resumed", **_about(path, worker, run), series=taken, dropped_series=0)
            except (OSError, ValueError) as failure:
                self._log.warning("ledger.resumed", **_about(path, worker, run), series=0, **_failure(failure))
            finally:
                os.close(lock)


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_forget_in_child)


def _forget_in_child() -> None:
    """A forked child's books are its parent's, and so is the lock, which the child's copy of the file would keep alive."""
    global _guard  # another thread of the parent may hold the old one, and does not exist here
    _guard = RLock()
    for book in _books.values():
        _close(book)
    _books.clear()


def _close(book: _Book) -> None:
    while book.texts:
        os.close(book.texts.pop())
    if book.lock is not None:
        os.close(book.lock)
        book.lock = None


def _file_name(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]", "_", text)[:_NAME_CHARACTERS]
    return name if name == text else f"{name}.{zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x}"


def _locked(path: Path) -> int:
    """The lock beside a ledger, held by this process from now on. Raises BlockingIOError while another holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _read(path: Path, head_bytes: int = -1) -> str:
    """A ledger's text. Raises FileNotFoundError, OSError, or ValueError for what cannot be one (a pipe is not waited for)."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(file, "rb") as opened:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST_LEDGER_BYTES:
            raise ValueError(f"{path.name} is no regular file of at most {LARGEST_LEDGER_BYTES} bytes")
        return opened.read(head_bytes).decode(errors="strict" if head_bytes < 0 else "replace")


def _worker_of_file(path: Path) -> Worker | None:
    """Whose ledger a file is, by its beginning."""
    try:
        return worker_of_text(_read(path, _HEAD_BYTES))
    except (OSError, ValueError):
        return None


def _write_aside(path: Path, text: str, *, flush: bool) -> int:
    """Replace a file's text at once; returns the new file, open. Readable for all: the reader is another user's exporter."""
    aside = path.with_name(path.name + ".tmp")
    with suppress(FileNotFoundError):
        aside.unlink()
    file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        with os.fdopen(file, "wb", closefd=False) as opened:
            opened.write(text.encode())
        os.fchmod(file, 0o644)
        if flush:
            # Without this a power cut could leave the new name on an empty file. The directory is not synced: what
            # a power cut may then lose is the newest text, not the ledger.
            os.fsync(file)
        os.replace(aside, path)
    except BaseException:
        os.close(file)
        with suppress(OSError):
            aside.unlink()
        raise
    return file


def _about(path: Path, worker: Worker | None, run: Run | None) -> dict[str, str]:
    return {
        "run_id": run.run_id if run else "",
        "model_name": worker.model_name if worker else "",
        "role": worker.role if worker else "",
        "worker_id": worker.worker_id if worker else "",
        "file": path.name,
    }


def _failure(failure: Exception) -> dict[str, str | None]:
    code = errno.errorcode.get(failure.errno or 0) if isinstance(failure, OSError) else None
    return {"error_type": type(failure).__name__, "error_code": code}
