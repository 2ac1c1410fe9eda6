"""kvreg's log in a process whose logging is the engine's and LMCache's."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("vllm") is None or find_spec("lmcache") is None, reason="vLLM and LMCache are not installed"),
]

BESIDE = """
import logging
import vllm.logger, lmcache.logging

def state():
    named = {name: logger for name, logger in logging.root.manager.loggerDict.items() if isinstance(logger, logging.Logger)}
    theirs = {name: logger for name, logger in named.items() if not name.startswith("kvreg")}
    return {name: (logger.level, logger.handlers[:], logger.propagate) for name, logger in [("", logging.root), *theirs.items()]}

engine, cache = vllm.logger.init_logger("vllm.some"), lmcache.logging.init_logger("lmcache.some")
from metrics.events import EventObserver
from orchestrator.logs import set_up_logs
from tests.metrics.watched import run
from tests.offers import hybrid

before = state()
set_up_logs()
run(hybrid(mode="none"), [EventObserver()])
assert {name: settings for name, settings in state().items() if name in before} == before
engine.warning("the engine goes on")
cache.warning("so does the cache")
"""


def test_the_engines_and_lmcaches_logs_stay_as_they_are() -> None:
    """Their loggers keep handlers and levels and write as before; kvreg's events are written once, as JSON lines among theirs."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "HOME": "/nonexistent"}
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", BESIDE], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    lines = (ran.stdout + ran.stderr).splitlines()
    ours = [json.loads(line)["event"] for line in lines if line.startswith("{")]
    assert ours == ["registration.started", "kv_group.rejected", "registration.rejected"]
    assert len([line for line in lines if "the engine goes on" in line]) == 1
    assert len([line for line in lines if "so does the cache" in line]) == 1
    assert not [line for line in lines if "registration" in line and not line.startswith("{")]
