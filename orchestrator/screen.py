"""What a person reads in a terminal: verdicts, groups, layers, rules. Values in, rich renderables out; nothing is decided here."""

import os
from collections.abc import Iterable, Iterator, Sequence

from rich.box import ROUNDED, SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor

from orchestrator.check import Accepted, Rejected
from stages.edit import IDENTITY_SPLIT_VIEW
from stages.errors import Reason, Rejection, Stage
from stages.model import EditedLayer, EngineGroup, ExcludedLayer, Offer, Plan
from stages.rules import Rule

PIPED_COLUMNS = 100
"""The width where there is no terminal to ask."""

UNBROKEN = frozenset({"rule", "reason"})
"""Columns of names that a person searches for, never broken over two lines."""

_SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def console() -> Console:
    """Standard output, as wide as the terminal; `COLUMNS` overrides it."""
    out = Console(highlight=False, emoji=False, markup=False)
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = PIPED_COLUMNS
    return out


def plain(text: str) -> str:
    """Text that moves no cursor: names come from files, so what does not print is shown as its escape."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def table(*columns: str, right: Sequence[str] = (), title: str | None = None) -> Table:
    """An empty table; the columns named in `right` hold numbers."""
    out = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    out.title, out.title_justify, out.title_style = title, "left", "bold"
    for column in columns:
        out.add_column(column, justify="right" if column in right else "left", overflow="fold", no_wrap=column in UNBROKEN)
    return out


def verdict(snapshot: str, answer: Accepted | Rejected) -> RenderableType:
    """One snapshot's answer: what would be registered and how, or who is refused, why, and the way out."""
    accepted = isinstance(answer, Accepted)
    mark = Text("✓ accepted" if accepted else "✗ rejected", style="bold green" if accepted else "bold red")
    heading = Group(mark + Text(f"  {plain(snapshot)}", style="bold"), Text(_offered(answer.offer), style="dim"))
    if isinstance(answer, Rejected):
        return Group(heading, *refusals(answer.rejections), "")
    return Group(heading, *(Padding(part, (1, 0, 0, 2)) for part in (groups(answer.plan), layers(answer.plan))), "")


def tally(answers: Sequence[Accepted | Rejected]) -> Text:
    """How many of how many."""
    accepted = sum(isinstance(answer, Accepted) for answer in answers)
    return Text(f"{len(answers)} snapshots: {accepted} accepted, {len(answers) - accepted} rejected", style="bold")


def groups(plan: Plan) -> Table:
    """The engine groups, one row for each that a transfer kernel copies."""
    numbers = ("blocks", "tokens", "slots", "bytes", "stride", "window")
    out = table("group", "layers", "holds", *numbers, "read as", right=("layers", *numbers))
    out.caption, out.caption_justify, out.caption_style = "tokens, slots, bytes and stride (bytes) are of one block", "left", "dim"
    for group in plan.groups:
        out.add_row(
            str(group.engine_group_id),
            str(len(group.layer_names)),
            _holds(plan, group),
            *(f"{number:,}" for number in (group.num_blocks, group.tokens_per_block, group.slots_per_block)),
            f"{group.block_bytes:,}",
            f"{group.block_stride_bytes:,}",
            "all" if group.sw_size_tokens < 0 else f"{group.sw_size_tokens:,}",
            "opaque page" if group.opaque else "slots",
        )
    if not plan.groups:
        out.add_row("", "", Text("nothing is transferred", style="yellow"))
    return out


def layers(plan: Plan) -> Table:
    """Every layer with the rule that edited it; layers that differ only in their place in memory are one row."""
    out = table("group", "layers", "registered as", "rule", "transferred as")
    for row in _summarised(plan):
        out.add_row(*row)
    return out


def refusals(rejections: Sequence[Rejection]) -> Iterator[Panel]:
    """Each refusal: where, the facts, and the way out; groups refused for one reason and the same facts share a panel."""
    alike: dict[object, list[Rejection]] = {}
    for rejection in rejections:
        alike.setdefault((rejection.stage, rejection.reason, rejection.rule, tuple(rejection.facts.items())), []).append(rejection)
    for same in alike.values():
        yield _refusal(same)


def _refusal(rejections: Sequence[Rejection]) -> Panel:
    first = rejections[0]
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="dim")
    lines.add_column(overflow="fold")
    if first.rule:
        lines.add_row("rule", first.rule)
    places = [place for rejection in rejections if (place := _place(rejection))]
    for index, place in enumerate(places):
        lines.add_row("" if index else "where", place)
    if first.facts:
        lines.add_row("facts", plain(", ".join(f"{name} {_fact(fact)}" for name, fact in first.facts.items())))
    lines.add_row("hint", Text(plain(first.hint), style="green"))
    return Panel(lines, title=Text(f"{first.stage}: {first.reason}", style="bold"), title_align="left", border_style="red", box=ROUNDED)


def rules(known: Iterable[Rule]) -> Table:
    """The rules in the order they are tried."""
    out = table("", "rule", "what it does", right=("",), title="Rules: the first that matches a layer edits it, then the layer is proven")
    for number, rule in enumerate(known, 1):
        out.add_row(str(number), rule.name, rule.summary)
    out.add_row("+", IDENTITY_SPLIT_VIEW, "layers of a group that a transfer would take for one kind → made to look different, same bytes")
    return out


def reasons() -> Table:
    """Every reason for a refusal or a failed transfer, and the way out."""
    out = table("reason", "hint", title="Reasons: why a layer is refused, and the way out")
    for reason in Reason:
        out.add_row(reason, blank_hint(reason))
    return out


def blank_hint(reason: Reason) -> str:
    """A reason's hint, its facts as <names>."""
    return Rejection(Stage.VALIDATE, reason).hint


def _place(rejection: Rejection) -> str:
    """`group 3: l.3.attn, l.7.attn`, as far as either is known."""
    said = [] if rejection.group is None else [f"group {rejection.group}"]
    return ": ".join([*said, *([_names(rejection.layer_names)] if rejection.layer_names else [])])


def _offered(offer: Offer) -> str:
    said = [f"{offer.engine.name} {offer.engine.version}", offer.model_name, f"layout {offer.layout or 'not said'}"]
    said += [f"rank {offer.worker.rank} of {offer.worker.world_size}"] if offer.worker.world_size > 1 else []
    said += [f"dcp {offer.dcp_size}"] if offer.dcp_size > 1 else []
    said += [f"LMCache chunk {offer.chunk_size_tokens}"] if offer.chunk_size_tokens else []
    return "  " + plain(" · ".join(part for part in said if part))


def _holds(plan: Plan, group: EngineGroup) -> str:
    kinds = {plan.layers[index].layer.spec.kind for index in group.layer_indices}
    return ", ".join(sorted(kind.removesuffix("_attention") for kind in kinds))


def _summarised(plan: Plan) -> Iterator[tuple[str, str, str, str, str]]:
    """Rows of layers, by group; within a group layers of one geometry and rule are one row."""
    described = [((str(layer.layer.group), *geometry(layer)), layer.layer.name) for layer in plan.layers]
    described += [(("-" if layer.group is None else str(layer.group), "", "", _left_out(layer)), layer.name) for layer in plan.excluded]
    first = {group: index for index, group in reversed(list(enumerate(key[0] for key, _ in described)))}
    in_groups = sorted(described, key=lambda row: first[row[0][0]])
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for key, name in in_groups:
        rows.setdefault(key, []).append(name)
    for (group, registered, rule, transferred), names in rows.items():
        yield group, _names(names), registered, rule, transferred


def geometry(edited: EditedLayer) -> tuple[str, str, str]:
    """A layer as the engine registered it, the rule that edited it, and as it is transferred."""
    raw = "\n".join(_tensor(part.tensor) for part in edited.layer.cache.tensors)
    return (raw, edited.rule, _tensor(edited.view)) if edited.rule else (raw, "-", "as registered")


def _left_out(layer: ExcludedLayer) -> str:
    return f"not transferred: {layer.exclusion.replace('_', ' ')}"


def _tensor(tensor: Tensor) -> str:
    """`bf16 [102,2,32,512]`."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{_SHORT_DTYPES.get(dtype, dtype)} [{','.join(map(str, tensor.shape))}]"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names) if len(names) <= 2 else f"{names[0]} … {names[-1]} ({len(names)})"
    return plain(shown)


def _fact(fact: object) -> str:
    return ", ".join(map(_fact, fact)) if isinstance(fact, tuple) else str(fact)
