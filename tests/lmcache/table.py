"""The end-to-end table: `python -m tests.lmcache.table [case …]`, every case with kvreg's connector and LMCache's own beside it.

Exit code 0 if every case loads tokens and differs from computing by nothing that a user could see.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.lmcache.harness import Server, server
from tests.lmcache.matrix import CASES, CHUNK, TENSOR_PARALLEL, Case, Comparison, compare, run, run_stock

ALL = {case.name: case for case in (*CASES, TENSOR_PARALLEL)}


def main(names: Sequence[str]) -> int:
    """Run the named cases, or all, and print one row each."""
    console = Console()
    table = Table("case", "geometry", "hit tokens", "max log-probability difference", "stock LMCache", title="kvreg end to end on CPU")
    passed = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with server(folder, CHUNK) as running:
            for case in [ALL[name] for name in names or ALL]:
                runs = run(case, folder, running)
                seen = [compare(runs.baseline, runs.first), compare(runs.baseline, runs.fresh)]
                passed = passed and all(sum(one.hits) and one.equal for one in seen)
                hits = " ".join(str(sum(one.hits)) for one in seen)
                table.add_row(case.name, case.layout, hits, _difference(seen), _stock(case, folder, running, runs.baseline))
    console.print(table)
    console.print("hit tokens: in the engine that stored them, and in a fresh process")
    return 0 if passed else 1


def _difference(seen: Sequence[Comparison]) -> str:
    worst = max(one.logprob_difference for one in seen)
    return f"{worst:.1e}" + ("" if all(one.same_tokens for one in seen) else ", other tokens")


def _stock(case: Case, folder: Path, running: Server, baseline: list[dict[str, object]]) -> str:
    """LMCache's own connector on a model of the same weights and another name, so that it loads only what it stored."""
    try:
        seen = compare(baseline, run_stock(replace(case, name=f"{case.name}-stock"), folder, running))
    except AssertionError as failure:
        return "engine failed: " + str(failure).strip().splitlines()[-1][:60]
    return f"{sum(seen.hits)} hit tokens, {_difference([seen])}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
