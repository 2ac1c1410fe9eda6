"""What vLLM loads first in every process of an engine (entry point group `vllm.general_plugins`).

A refusal comes minutes after the start and milliseconds before the end, too late for a scrape to see its counter at
zero. So the ledgers are written here, while the model has yet to load: what they hold is gone on from, and series that
do not exist yet begin at zero. vLLM passes nothing to a plug-in; the model, the number of workers and kvreg's settings
are read from the command line of `vllm serve`, which every process of the engine has, or from the environment:

    KVREG_LEDGER_DIR    the ledger directory, if the setting kvreg.ledger_dir does not name one
    KVREG_INSTANCE      the engine's name in it, if the setting kvreg.instance does not give one
"""

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path

from orchestrator.config import KVRegConfig

LEDGER_DIR = "KVREG_LEDGER_DIR"
INSTANCE = "KVREG_INSTANCE"

_log = logging.getLogger("kvreg.plugin")

_MODEL, _SERVED = ("--model",), ("--served-model-name",)
_TENSOR, _PIPELINE = ("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp")
_ELSEWHERE = (("--data-parallel-size", "-dp"), ("--nnodes", "-n"))
_TRANSFER = ("--kv-transfer-config",)


def load() -> None:
    """Write this engine's ledgers before it runs, where a ledger directory is set. Never raises; without one does nothing."""
    try:
        prepare(sys.argv, os.environ)
    except Exception:  # noqa: BLE001 - the engine starts, and serves, without metrics too
        _log.exception("kvreg: the ledgers were not prepared; the engine is not affected")


def prepare(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """`load` for a given command line and environment. Raises ConfigError for settings that cannot be used."""
    config = KVRegConfig.parse(_extra_config(argv))
    place = ledger_place(config, environ)
    if place is None:
        return
    from metrics.catalogue import Worker  # not above: engines without a ledger do not pay for it
    from metrics.ledger import WORKER_ROLE, Ledger

    directory, instance = place
    ledger = Ledger(directory, instance)
    found = ledger.declare_found()
    named = [Worker(model_name, WORKER_ROLE, worker_id) for model_name, worker_id in served(argv)]
    ledger.declare(named if named or found else [Worker("", WORKER_ROLE, "0")])


def ledger_place(config: KVRegConfig, environ: Mapping[str, str]) -> tuple[Path, str | None] | None:
    """The ledger directory and this engine's name in it (None: the host's), by settings first, then environment."""
    directory = config.ledger_dir or environ.get(LEDGER_DIR)
    return (Path(directory), config.instance or environ.get(INSTANCE) or None) if directory else None


def served(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The model's name and id of each worker that this command line of `vllm serve` starts on this host.

    None where it does not say: no model on it, or workers that are counted over several engines or hosts.
    """
    model = _option(argv, _SERVED) or _option(argv, _MODEL) or _after_serve(argv)
    if not model or any(_option(argv, names) not in (None, "1") for names in _ELSEWHERE):
        return
    sizes = [_option(argv, names) or "1" for names in (_TENSOR, _PIPELINE)]
    if all(size.isdecimal() for size in sizes):
        for rank in range(int(sizes[0]) * int(sizes[1])):
            yield model, str(rank)


def _extra_config(argv: Sequence[str]) -> Mapping[str, object]:
    """The connector's extra config; empty where the command line has none that can be read."""
    try:
        extra = json.loads(_option(argv, _TRANSFER) or "{}")["kv_connector_extra_config"]
    except (ValueError, KeyError, TypeError):
        return {}
    return extra if isinstance(extra, dict) else {}


def _option(argv: Sequence[str], names: Sequence[str]) -> str | None:
    """The last value of an option, `--name value` or `--name=value`, words joined by `-` or `_`."""
    value = None
    for word, following in zip_longest(argv, argv[1:], fillvalue=""):
        name, equals, joined = word.partition("=")
        if name.startswith("-") and name.replace("_", "-") in names:
            value = joined if equals else following
    return value


def _after_serve(argv: Sequence[str]) -> str | None:
    """The model of `vllm serve MODEL`."""
    following = [after for word, after in pairwise(argv) if word == "serve"]
    return following[0] if following and not following[0].startswith("-") else None
