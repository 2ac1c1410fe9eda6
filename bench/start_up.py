"""What importing kvreg's connector adds to importing LMCache's: each import in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.measure import Section, Spread

ROOT = Path(__file__).parent.parent
ROUNDS = 3

THEIRS = "lmcache.integration.vllm.lmcache_mp_connector"
OURS = "orchestrator.connector"

MEASURE = """
import json, sys, time
from importlib import import_module
def resident_kib():  # not ru_maxrss, which a process inherits from the one that started it
    return int(open("/proc/self/statm").read().split()[1]) * 4
first, second = sys.argv[1:]
begin = time.perf_counter()
import_module(first)
middle = time.perf_counter()
before = resident_kib()
known = set(sys.modules)
import_module(second)
end = time.perf_counter()
after = resident_kib()
added = sorted(name.split(".")[0] for name in set(sys.modules) - known)
print()
print(json.dumps([middle - begin, end - middle, before, after - before, added]))
"""
"""Seconds of a first import and of a second, KiB resident after the first and added by the second, and its modules."""

CONSTRUCT = """
import json, time
from bench.hybrid import hybrid
import orchestrator.connector
from metrics.counts import CountsObserver
from metrics.events import EventObserver
from orchestrator.config import KVRegConfig
from orchestrator.engine.observe import observe
from orchestrator.logs import set_up_logs
from stages.validate import Refusals, check_groups
def resident_kib():  # not ru_maxrss, which a process inherits from the one that started it
    return int(open("/proc/self/statm").read().split()[1]) * 4
config, _ = hybrid(96)
before = resident_kib()
begin = time.perf_counter()
KVRegConfig.parse({})
set_up_logs(as_json=True)
observers = CountsObserver(), EventObserver()
refusals = Refusals()
check_groups(observe(config, {}, layout="LBNHC"), refusals)
refusals.raise_if_any()
end = time.perf_counter()
print()
print(json.dumps([end - begin, resident_kib() - before]))
"""
"""What the connector's constructor does of its own, for 96 layers, besides asking the server and LMCache's constructor."""


def run() -> Section:
    """The connector after LMCache's own, and the command line after torch."""
    rows, packages = [], ""
    for what, first, second in (("the connector", THEIRS, OURS), ("`kvreg check`", "torch", "orchestrator.cli")):
        runs = [_measured(MEASURE, first, second) for _ in range(ROUNDS)]
        base_ms, added_ms = Spread.of(run[0] * 1e3 for run in runs), Spread.of(run[1] * 1e3 for run in runs)
        share = Spread.of(run[1] / run[0] for run in runs)
        base_mib, added_mib = (Spread.of(run[place] / 1024 for run in runs).middle for place in (2, 3))
        rows.append(
            (what, f"`{first}`", f"{base_ms:.0f} ms", f"{added_ms:.0f} ms", f"{share:.3f}", f"{base_mib:.0f} MiB", f"{added_mib:.1f} MiB")
        )
        if second == OURS:
            names: list[str] = runs[0][4]
            packages = ", ".join(f"{name} ({names.count(name)})" for name in sorted(set(names), key=lambda name: -names.count(name))[:8])
    built = [_measured(CONSTRUCT) for _ in range(ROUNDS)]
    constructed_ms, constructed_kib = Spread.of(run[0] * 1e3 for run in built), Spread.of(run[1] for run in built)
    return Section(
        "Start-up",
        f"Import time and resident memory, {ROUNDS} processes each: first what is needed anyway, then what kvreg adds to it.\n"
        "Constructing the connector is LMCache's constructor after one question to the server; kvreg's own part of it stands below.",
        ("", "after", "which takes", "kvreg adds", "added over what was there", "resident", "kvreg adds"),
        rows,
        f"Constructing adds {constructed_ms:.1f} ms and {constructed_kib:.0f} KiB: settings, logs, observers, and the check of the\n"
        f"engine's groups for 96 layers. Modules that the connector adds, by package: {packages}.",
    )


def _measured(script: str, *arguments: str) -> list[Any]:
    """What a script printed last, run in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    measured: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return measured
