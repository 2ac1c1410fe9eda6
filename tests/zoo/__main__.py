"""Plan every model of the zoo on 1, 2, 4 and 8 ranks and print one table: `python -m tests.zoo [FILE]`; FILE is rewritten with it.

One process, because importing vLLM takes longer than all the planning; one rank of each size, because vLLM itself insists
that tensor-parallel ranks have the same specs.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from orchestrator.check import Rejected
from orchestrator.engine.preflight.plan import plan
from orchestrator.preflight import Answer, answer
from orchestrator.preflight_screen import markdown_table
from stages.errors import PreflightImpossible

ZOO = Path(__file__).parent
TARGET = "cuda-sm90"
RANKS = (1, 2, 4, 8)
COLUMNS = ("model", "architecture", "ranks", "served", "logical block", "kernel block", "attention", "smallest chunk", "padding")

HEADING = f"""# Models

What `kvreg preflight --assume {TARGET}` says of each configuration in [tests/zoo](../tests/zoo/README.md), on 1, 2, 4 and 8
tensor-parallel ranks, with no other flag. Nothing was measured: vLLM's own code planned, kvreg's proof judged. Ranks of one
model that get the same answer share a row. `make zoo` rewrites this page, and a test keeps it current.
"""


def models() -> list[Path]:
    """The folders of the zoo, by name."""
    return sorted(path.parent for path in ZOO.glob("*/config.json"))


def page() -> str:
    """The page of the zoo, as Markdown."""
    rows = [row for model in models() for row in of_model(model)]
    served = sum(row[3] == "yes" for row in rows)
    return f"{HEADING}\n{markdown_table(COLUMNS, rows)}\n\n{served} of {len(rows)} rows are served.\n"


def of_model(model: Path) -> Iterator[tuple[str, ...]]:
    """A model's rows: one for all sizes that get the same answer."""
    sizes: dict[tuple[str, ...], list[str]] = {}
    for ranks in RANKS:
        try:
            planned = plan(str(model), ["--tensor-parallel-size", str(ranks)], TARGET, every_rank=False)
        except PreflightImpossible as error:
            said: tuple[str, ...] = ("", cell(f"no plan: {error}"), "", "", "", "", "")
        else:
            said = of_answer(answer(model.name, planned))
        sizes.setdefault(said, []).append(str(ranks))
    for (architecture, *said_of), ranks_of in sizes.items():
        yield (model.name, architecture, ", ".join(ranks_of), *said_of)


def of_answer(told: Answer) -> tuple[str, ...]:
    groups = [group for checked in told.workers for group in checked.groups]
    refusals = {
        str(rejection.reason) for each in told.workers if isinstance(each.verdict, Rejected) for rejection in each.verdict.rejections
    }
    return (
        told.planned.architecture,
        "yes" if told.accepted else f"no: {', '.join(sorted(refusals))}",
        listed(sorted({group.logical_block_tokens for group in groups})),
        listed(sorted({group.kernel_block_tokens for group in groups})),
        listed(sorted({name for group in groups for name in group.backends})),
        str(told.chunk_tokens),
        f"{told.padding_share:.1%}",
    )


def listed(values: list[int] | list[str]) -> str:
    return ", ".join(map(str, values))


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    written = page()
    print(written)
    for path in sys.argv[1:]:
        Path(path).write_text(written, encoding="utf-8")
