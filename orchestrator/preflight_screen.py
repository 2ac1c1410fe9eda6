"""A preflight's answer as a person reads it: in a terminal, or as Markdown in a pull request."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from orchestrator import screen
from orchestrator.check import Rejected
from orchestrator.preflight import Answer, Checked, GroupLine, lines
from stages.errors import Rejection

_GROUP_COLUMNS = ("group", "layers", "holds", "logical", "kernel", "backend", "page bytes", "padding", "bytes per token")
_GROUP_NUMBERS = ("layers", "logical", "kernel", "page bytes", "padding", "bytes per token")


def preflight(told: Answer) -> RenderableType:
    """All of it: how sure each line is, then each kind of worker's blocks and what `check` says of it."""
    return Group(_lines(told), *(part for alike in told.distinct for part in _workers(told, alike)))


def _lines(told: Answer) -> Table:
    out = screen.table("", "planned", "is", "because")
    for line in lines(told):
        sure = Text("certain", style="green") if line.certain else Text("assumed", style="yellow")
        out.add_row(line.name, screen.plain(line.value), sure, Text(line.because, style="dim"))
    return out


def _workers(told: Answer, alike: Sequence[Checked]) -> Iterator[RenderableType]:
    out = screen.table(*_GROUP_COLUMNS, right=_GROUP_NUMBERS, title=_ranks(told, alike))
    out.caption, out.caption_justify, out.caption_style = (
        "logical and kernel are tokens of a block; bytes are of one layer's block",
        "left",
        "dim",
    )
    for group in alike[0].groups:
        out.add_row(*_row(group))
    yield ""
    yield Padding(out, (0, 0, 0, 2))
    yield ""
    yield screen.verdict(told.model, alike[0].verdict)


def _ranks(told: Answer, alike: Sequence[Checked]) -> str:
    if len(told.workers) == 1:
        return "The worker"
    names = [f"tp {checked.worker.tp_rank} pp {checked.worker.pp_rank}" for checked in alike]
    return f"Worker {names[0]}" if len(names) == 1 else f"Workers {names[0]} … {names[-1]} ({len(names)}, alike)"


def _row(group: GroupLine) -> tuple[str, ...]:
    return (
        str(group.group),
        str(group.layers),
        ", ".join(kind.removesuffix("_attention") for kind in group.kinds),
        str(group.logical_block_tokens),
        str(group.kernel_block_tokens),
        ", ".join(group.backends),
        f"{group.page_bytes:,}",
        f"{group.padding_share:.1%}",
        f"{group.bytes_per_token:,.0f}",
    )


# --------------------------------------------------------------------------------------------------------- in Markdown


def markdown(told: Answer) -> str:
    """The same for a pull request's comment."""
    parts = [f"### {'✓ accepted' if told.accepted else '✗ rejected'}: `{_cell(told.model)}`"]
    parts.append(
        markdown_table(("", "planned", "is", "because"), [_line(line.name, line.value, line.certain, line.because) for line in lines(told)])
    )
    for alike in told.distinct:
        parts.append(f"**{_ranks(told, alike)}**")
        parts.append(markdown_table(_GROUP_COLUMNS, [tuple(map(_cell, _row(group))) for group in alike[0].groups]))
        if isinstance(alike[0].verdict, Rejected):
            parts.append("\n".join(_refusal(rejection) for rejection in alike[0].verdict.rejections))
    return "\n\n".join(parts) + "\n"


def _line(name: str, value: str, certain: bool, because: str) -> tuple[str, ...]:
    return _cell(name), f"`{_cell(value)}`", "certain" if certain else "_assumed_", _cell(because)


def _refusal(rejection: Rejection) -> str:
    return f"- `{_cell(rejection.message)}`: {_cell(rejection.hint)}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; cells are Markdown already."""
    body = [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]
    return "\n".join(body)


def _cell(text: str) -> str:
    """Text that stays in its cell."""
    return screen.plain(text).replace("|", "\\|").replace("`", "'")
