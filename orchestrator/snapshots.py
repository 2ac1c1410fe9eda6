"""Snapshots of registrations kept in a directory: one file each, the oldest removed beyond a limit."""

import logging
import os
import re
import time
from contextlib import suppress
from pathlib import Path

from orchestrator import snapshot
from orchestrator.config import KVRegConfig
from stages.model import Offer

_log = logging.getLogger("kvreg.snapshots")

_SUFFIX = ".kvreg.json"


def keep_snapshot(offer: Offer | None, config: KVRegConfig, *, refused: bool) -> None:
    """Write the offer's snapshot to the configured directory, if there is one, and say where. Never raises."""
    if offer is None or config.snapshot_dir is None:
        return
    model = re.sub(r"[^A-Za-z0-9._-]+", "_", offer.model_name).strip("_")[-60:] or "model"
    outcome = "refused" if refused else "registered"
    name = f"{time.strftime('%Y%m%dT%H%M%S')}-{model}-rank{offer.worker.rank}-{os.getpid()}-{outcome}{_SUFFIX}"
    path = config.snapshot_dir / name
    try:
        config.snapshot_dir.mkdir(parents=True, exist_ok=True)
        snapshot.write(offer, path)
        _remove_oldest(config.snapshot_dir, config.snapshot_limit)
    except Exception:  # noqa: BLE001 - a full disk must not change what became of the registration
        _log.exception("kvreg: could not keep a snapshot in %s", config.snapshot_dir)
        return
    _log.info("kvreg: snapshot of this registration (%s) in %s; replay it with: kvreg check %s", outcome, path, path)


def _remove_oldest(folder: Path, limit: int) -> None:
    """Remove all but the newest. A file from the future was written before the clock was set back, so it is an old one."""
    kept: list[tuple[int, str]] = []
    for file in folder.glob(f"*{_SUFFIX}"):
        with suppress(FileNotFoundError):  # another worker has just removed it
            kept.append((file.stat().st_mtime_ns, file.name))
    now = time.time_ns()
    kept.sort(key=lambda file: (file[0] <= now, *file))
    for _, name in kept[:-limit]:
        (folder / name).unlink(missing_ok=True)
