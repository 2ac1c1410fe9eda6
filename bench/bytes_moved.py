"""Bytes that a transfer moves for a block, against those that its layers own: over every snapshot that is accepted."""

from collections import defaultdict
from pathlib import Path

from bench.measure import Section, Spread, bar
from orchestrator.snapshot import read
from stages.edit import edit
from stages.engine_groups import engine_groups
from stages.errors import RegistrationRejected
from stages.model import Plan
from stages.validate import validate

CASES = Path(__file__).parent.parent / "tests" / "cases"
BAR = 1.003


def run() -> Section:
    """Every accepted snapshot, each case by the worst of its groups."""
    cases: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for path in sorted(path for path in CASES.glob("*.json") if not path.name.endswith(".expect.json")):
        try:
            plan = engine_groups(edit(validate(read(path))))
        except RegistrationRejected:
            continue
        era = path.name.split("-", 1)[0]
        cases[era] += [(over_owned(plan), path.stem)] if plan.layers else []
    rows = []
    for era, found in sorted(cases.items()):
        exact = sum(ratio == 1 for ratio, _ in found)
        worst, name = max(found)
        rows.append(
            (era, str(len(found)), str(exact), f"{Spread.of(ratio for ratio, _ in found):.4f}", f"{name}: {worst:.4f}" if worst > 1 else "")
        )
    worst = max(found for era in cases.values() for found in era)[0]
    return Section(
        "Bytes moved for a block",
        "Bytes that a transfer moves for one block of every layer of a group, over those the layers own in it; a case counts by the\n"
        "worst of its groups. Counted, not timed: from the proven plans of the snapshots in `tests/cases`, whose bytes the tests\n"
        "judge one by one. What is above 1 is padding: recurrent state is addressed as one share for each token of the block, and a\n"
        "share is rounded up to the 16 bytes that a GPU copies at once. Narrower shares would move less and copy slower.",
        ("from", "cases", "exactly 1", "ratio", "worst"),
        rows,
        bar(f"at most {BAR} in every case", worst <= BAR),
    )


def over_owned(plan: Plan) -> float:
    """Bytes moved over bytes owned, in the worst of a plan's groups."""
    ratios = []
    for group in plan.groups:
        layers = [plan.layers[index] for index in group.layer_indices]
        moved = sum(layer.page.planned.size_bytes for layer in layers)
        ratios.append(moved / sum(layer.layer.owned.size_bytes for layer in layers))
    return max(ratios)
