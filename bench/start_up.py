"""What importing kvreg's connector adds to importing LMCache's: each import in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.measure import Section, Spread

ROOT = Path(__file__).parent.parent
ROUNDS = 5

THEIRS = "lmcache.integration.vllm.lmcache_mp_connector"
OURS = "orchestrator.connector"

MEASURE = """
import json, resource, sys, time
from importlib import import_module
first, second = sys.argv[1:]
begin = time.perf_counter()
import_module(first)
middle = time.perf_counter()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
known = set(sys.modules)
import_module(second)
end = time.perf_counter()
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
added = sorted(name.split(".")[0] for name in set(sys.modules) - known)
print()
print(json.dumps([middle - begin, end - middle, before, after - before, added]))
"""


def run() -> Section:
    """The connector after LMCache's own, and the command line after torch."""
    rows, packages = [], ""
    for what, first, second in (("the connector", THEIRS, OURS), ("`kvreg check`", "torch", "orchestrator.cli")):
        runs = [_measured(first, second) for _ in range(ROUNDS)]
        base_ms, added_ms = Spread.of(run[0] * 1e3 for run in runs), Spread.of(run[1] * 1e3 for run in runs)
        share = Spread.of(run[1] / run[0] for run in runs)
        base_mib, added_mib = (Spread.of(run[place] / 1024 for run in runs).middle for place in (2, 3))
        rows.append(
            (what, f"`{first}`", f"{base_ms:.0f} ms", f"{added_ms:.0f} ms", f"{share:.3f}", f"{base_mib:.0f} MiB", f"{added_mib:.1f} MiB")
        )
        if second == OURS:
            names: list[str] = runs[0][4]
            packages = ", ".join(f"{name} ({names.count(name)})" for name in sorted(set(names), key=lambda name: -names.count(name))[:8])
    return Section(
        "Start-up",
        f"Import time and peak resident memory, {ROUNDS} processes each: first what is needed anyway, then what kvreg adds to it.\n"
        "Constructing the connector is LMCache's constructor after one question to the server, and waits for that; it is not timed here.",
        ("", "after", "which takes", "kvreg adds", "added over what was there", "resident", "kvreg adds"),
        rows,
        f"Modules that the connector adds, by package: {packages}.",
    )


def _measured(first: str, second: str) -> list[Any]:
    """Seconds of the first import and of the second, KiB resident after the first and added by the second, and its modules."""
    command = [sys.executable, "-W", "ignore", "-c", MEASURE, first, second]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    measured: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return measured
