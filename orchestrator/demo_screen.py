"""The demonstration as a person reads it in a terminal."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from orchestrator import screen
from orchestrator.demo import BLOCK_TOKENS, KERNEL_TOKENS, LAYERS, LOST, NUM_BLOCKS, PAGE_BYTES, STORED, Demonstrated, Demonstration
from orchestrator.replay import Replayed
from stages.errors import Stage
from stages.model import Plan

_SHOWN_METRICS = (
    "kvreg_rule_applications",
    "kvreg_rule_rejections",
    "kvreg_runs",
    "kvreg_registered",
    "kvreg_stage_duration_seconds_count",
)


def demonstration(shown: Demonstration) -> RenderableType:
    """All of it, top to bottom: registration, groups, rules, bytes, the refusal, the metrics, the verdict."""
    return Group(
        Text("kvreg demo", style="bold"),
        Text(
            f"Five workers of a hybrid model of {LAYERS} layers, 18 recurrent and 6 attention: {NUM_BLOCKS} blocks of {BLOCK_TOKENS} "
            f"tokens,\npages of {PAGE_BYTES:,} B, attention paged by kernel blocks of {KERNEL_TOKENS} tokens. In this machine's memory.",
            style="dim",
        ),
        *_section("Registered at once, each through four stages", _workers(shown.workers)),
        *_section("Groups", *_groups(shown.workers)),
        *_section("Rules that applied", _rules(shown.workers)),
        *_section("Blocks stored, lost, and brought back", _bytes(shown)),
        *_section("Refused, by name", *_refused(shown.workers)),
        *_section("Counted", _metrics(shown)),
        "",
        _verdict(shown),
    )


def replayed(moved: Sequence[Replayed]) -> RenderableType:
    """What came back of each group of a snapshot."""
    out = screen.table("group", "layers", "owned bytes", "back", "others", right=("group", "layers", "owned bytes", "back"))
    for group in moved:
        out.add_row(
            str(group.group),
            str(group.layers),
            f"{group.owned_bytes:,}",
            f"{group.right_bytes:,}",
            "untouched" if group.untouched else Text("changed", style="bold red"),
        )
    return out


def _section(title: str, *parts: RenderableType) -> Iterator[RenderableType]:
    yield ""
    yield Rule(Text(title, style="bold cyan"), align="left", style="cyan")
    for part in parts:
        yield Padding(part, (0, 0, 0, 2))


def _workers(workers: Iterable[Demonstrated]) -> Table:
    """Who registered, and how long each stage took."""
    stages = {Stage.VALIDATE: "validate", Stage.EDIT: "edit", Stage.ENGINE_GROUP_INFO: "groups", Stage.TRANSFER_REGISTER: "register"}
    out = screen.table("worker", "layout", "states as", *stages.values(), "outcome", right=tuple(stages.values()))
    for worker in workers:
        good = worker.plan is not None
        out.add_row(
            worker.worker,
            worker.offer.layout or "",
            worker.states,
            *(f"{worker.stage_s[stage] * 1e3:.2f} ms" if stage in worker.stage_s else "-" for stage in stages),
            Text("✓ registered" if good else "✗ rejected", style="green" if good else "red"),
        )
    return out


def _groups(workers: Iterable[Demonstrated]) -> Iterator[Table]:
    """The groups, once for all workers that have the same."""
    alike: dict[str, list[tuple[str, Plan]]] = {}
    for worker in workers:
        if worker.plan is not None:
            alike.setdefault(_shape(worker.plan), []).append((f"{worker.worker} ({worker.offer.layout})", worker.plan))
    for number, members in enumerate(alike.values(), 1):
        out = screen.groups(members[0][1])
        out.title, out.title_style = f"workers {' and '.join(name for name, _ in members)}", "not bold"
        if number < len(alike):
            out.caption = ""  # once is enough, below the last table
        yield out


def _shape(plan: Plan) -> str:
    """What tells two workers' groups apart on the screen."""
    return repr([replace(group, layout_fingerprint="") for group in plan.groups])


def _rules(workers: Iterable[Demonstrated]) -> Table:
    """What each rule made of what, and for which workers."""
    rows: dict[tuple[str, str, str], dict[str, int]] = {}
    for worker in workers:
        for layer in worker.plan.layers if worker.plan else ():
            registered, rule, view = screen.geometry(layer)
            counts = rows.setdefault((rule, registered, view), {})
            counts[worker.worker] = counts.get(worker.worker, 0) + 1
    out = screen.table("rule", "workers", "layers", "registered as", "transferred as", right=("layers",))
    for (rule, registered, view), counts in sorted(rows.items(), key=lambda row: (row[0][0], sorted(row[1]))):
        out.add_row(rule, ", ".join(counts), str(sum(counts.values())), registered, view)
    return out


def _bytes(shown: Demonstration) -> Group:
    """How much moved, how fast, and how much of it was compared."""
    numbers = ("blocks", "bytes moved", "bytes compared", "bytes right")
    out = screen.table("worker", *numbers, "block 0", right=numbers)
    for worker in shown.workers:
        if worker.plan is not None:
            right = Text(f"{worker.right_bytes:,}", style="green" if worker.right_bytes == worker.owned_bytes else "bold red")
            touched = Text("untouched", style="green") if worker.untouched else Text("overwritten", style="bold red")
            blocks = sum(map(len, STORED.values()))
            out.add_row(worker.worker, str(blocks), f"{worker.stored_bytes:,}", f"{worker.owned_bytes:,}", right, touched)
    moved = sum(worker.stored_bytes for worker in shown.workers)
    said = (
        f"{moved / 1e6:.1f} MB stored in {_ms(shown.store_s)}, all of the engine's memory overwritten with 0x{LOST:X}, retrieved in "
        f"{_ms(shown.retrieve_s)}\ninto other blocks than they came from, and compared through the raw tensors' own indices"
    )
    return Group(Text(said, style="dim"), out)


def _ms(duration_s: float) -> str:
    return f"{duration_s * 1e3:.0f} ms"


def _refused(workers: Iterable[Demonstrated]) -> Iterator[Panel]:
    for worker in workers:
        for panel in screen.refusals(worker.rejections):
            panel.title = Text(f"worker {worker.worker}: ") + Text(str(panel.title), style="bold")
            yield panel


def _metrics(shown: Demonstration) -> Table:
    """Counters and gauges, summed over the workers."""
    sums: dict[tuple[str, str], float] = {}
    for name, labels, value in shown.counted:
        if name.startswith(_SHOWN_METRICS):
            own = ", ".join(f"{label}={said}" for label, said in labels.items() if label not in {"model_name", "role", "worker_id"})
            sums[name, own] = sums.get((name, own), 0) + value
    out = screen.table("metric", "labels", "sum", right=("sum",))
    for (name, own), value in sums.items():
        out.add_row(name, own, f"{value:,.0f}")
    return out


def _verdict(shown: Demonstration) -> Text:
    owned, right = sum(worker.owned_bytes for worker in shown.workers), sum(worker.right_bytes for worker in shown.workers)
    if shown.proven:
        return Text(f"✓ {right:,} of {owned:,} bytes are back; no other block was touched; the bad worker was refused", style="bold green")
    return Text(f"✗ {right:,} of {owned:,} bytes are back: this kvreg must not be used on this machine", style="bold red")
