"""`python -m tests.lmcache.compare`: each accepted snapshot by kvreg's views and by LMCache's own edits, both judged by bytes.

Writes docs/compare.md. The judge is `tests.oracle`'s arithmetic on the snapshot's JSON: it knows neither kvreg nor LMCache.
"""

import json
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Any

from orchestrator.snapshot import read
from stages.edit import edit
from stages.engine_groups import engine_groups
from stages.model import Offer
from stages.validate import validate
from tests import oracle

CASES = Path(__file__).parents[1] / "cases"
DOCUMENT = Path(__file__).parents[2] / "docs" / "compare.md"


class Verdict(StrEnum):
    """What became of the layers of one kind in one case."""

    RIGHT = "right"
    REFUSED = "refused"
    WRONG = "wrong"
    LEFT_OUT = "left out"


def main() -> None:
    """Print the table and write it down."""
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")  # LMCache's imports warn
    text = document(list(compared()))
    print(text)
    DOCUMENT.write_text(text, encoding="utf-8")
    print(f"written: {DOCUMENT}")


def compared() -> Iterator[tuple[str, str, Verdict, Verdict, str]]:
    """Of every accepted snapshot and each kind of layer in it: the case, the kind, kvreg's verdict, LMCache's, and what it said."""
    from tests.lmcache import peer
    from tests.lmcache.reading import Reading

    for path in oracle.snapshots(CASES):
        if json.loads(path.with_suffix(".expect.json").read_text())["outcome"] != "accepted":
            continue
        snapshot, offer = json.loads(path.read_text()), read(path)
        plan = engine_groups(edit(validate(offer)))
        if not plan.layers:
            continue
        reading = Reading(plan)
        reading.check()
        said = ""
        try:
            theirs = peer.served(offer)
        except Exception as refusal:  # noqa: BLE001 - whatever LMCache refuses with
            theirs, said = None, f"{type(refusal).__name__}: {refusal}".splitlines()[0]
        kinds = defaultdict(list)
        for layer in plan.layers:
            kinds[str(layer.layer.spec.kind)].append(layer.layer.name)
        for kind, names in kinds.items():
            ours = judged(snapshot, offer, names, reading.addressed)
            peers, why = judged(snapshot, offer, names, theirs.addressed) if theirs else (Verdict.REFUSED, said)
            yield path.stem, kind, ours[0], peers, why


def judged(
    snapshot: oracle.Json, offer: Offer, names: list[str], addressed: Callable[[str, int], list[oracle.Interval] | None]
) -> tuple[Verdict, str]:
    """Whether all of these layers' sampled blocks are copied whole, and nothing but their own padding besides."""
    for name in names:
        group = next((group for group in snapshot["groups"] if name in group["layer_names"]), None)
        if group is None:
            continue  # an auxiliary pool is in no group of vLLM's
        spec = (group.get("specs") or {}).get(name) or group["spec"]
        for block in sorted({0, 1, group["num_blocks"] // 2, group["num_blocks"] - 1} & set(range(group["num_blocks"]))):
            moved = addressed(name, block)
            if moved is None:
                return Verdict.LEFT_OUT, f"{name} is in no group"
            wrong = complaint(snapshot, name, spec, group["num_blocks"], block, oracle.merge(moved))
            if wrong:
                return Verdict.WRONG, f"{name} block {block}: {wrong}"
    return Verdict.RIGHT, ""


def complaint(snapshot: oracle.Json, name: str, spec: oracle.Json, num_blocks: int, block: int, moved: list[oracle.Interval]) -> str:
    """What is wrong with the bytes copied for a block of a layer; nothing if they are its own, and padding of its page at most."""
    cache: Any = snapshot["kv_caches"][name]
    first = cache[0] if isinstance(cache, list) else cache
    own = oracle.owned(cache, spec, num_blocks, block)
    missing = oracle.minus(own, moved)
    if missing:
        return f"{oracle.size(missing):,} of {oracle.size(own):,} bytes are not copied"
    spill = oracle.minus(moved, own)
    beyond = oracle.minus(spill, [(own[0][0], own[0][0] + spec["page_size_bytes"])])
    if beyond:
        return f"{oracle.size(beyond):,} bytes of somebody else are copied"
    neighbours = [
        run for other in (block - 1, block + 1) if 0 <= other < num_blocks for run in oracle.owned(cache, spec, num_blocks, other)
    ]
    if oracle.size(spill) != oracle.size(oracle.minus(spill, oracle.merge(neighbours))):
        return "bytes of a neighbouring block are copied"
    return "runs past the storage" if moved[-1][1] > snapshot["storages"][first["storage"]]["nbytes"] else ""


def document(found: list[tuple[str, str, Verdict, Verdict, str]]) -> str:
    """The tables of docs/compare.md."""
    cells = defaultdict(list)
    for case, kind, ours, theirs, _ in found:
        cells[case.split("-")[0], kind].append((ours, theirs))
    lines = [
        "| vLLM | kind of layer | cases | kvreg right | LMCache right | LMCache refuses | LMCache wrong, silently |",
        "|---|---|---|---|---|---|---|",
    ]
    for (era, kind), pairs in sorted(cells.items()):
        lines.append(_row(era, kind, pairs))
    lines.append(_row("all", "", [pair for pairs in cells.values() for pair in pairs]))
    whole = defaultdict(set)
    for case, _, _, theirs, _ in found:
        whole[case].add(theirs)
    right = sum(verdicts == {Verdict.RIGHT} for verdicts in whole.values())
    wrong = sum(bool(verdicts & {Verdict.WRONG, Verdict.LEFT_OUT}) for verdicts in whole.values())
    examples: dict[tuple[Verdict, str, str], list[str]] = defaultdict(list)
    for case, kind, _, theirs, why in found:
        if theirs is not Verdict.RIGHT:
            examples[theirs, kind, _words(why)].append(f"{case}: {why}")
    reasons = [f"| {verdict} | {kind} | {len(cases)} | `{cases[0][:220]}` |" for (verdict, kind, _), cases in sorted(examples.items())]
    return (
        "\n".join([HEAD.format(lmcache=version("lmcache"), cases=len(whole), right=right, wrong=wrong), *lines, REASONS, *reasons]) + "\n"
    )


def _row(era: str, kind: str, pairs: list[tuple[Verdict, Verdict]]) -> str:
    theirs = [peer for _, peer in pairs]
    wrong = theirs.count(Verdict.WRONG) + theirs.count(Verdict.LEFT_OUT)
    counts = (
        len(pairs),
        [ours for ours, _ in pairs].count(Verdict.RIGHT),
        theirs.count(Verdict.RIGHT),
        theirs.count(Verdict.REFUSED),
        wrong,
    )
    return f"| {era} | {kind} | {' | '.join(map(str, counts))} |"


def _words(why: str) -> str:
    """A reason without its numbers and names, so that alike ones count as one."""
    return "".join(letter for letter in why.split(": ", 1)[-1] if letter.isalpha() or letter == " ")[:60]


HEAD = """# kvreg and LMCache on the same registrations

Made by `make compare`. Every snapshot in `tests/cases` that kvreg accepts, twice through LMCache {lmcache}'s own format
discovery and `KVLayerGroupsManager`: once with kvreg's views and groups, once with LMCache's own edits and group infos. For
blocks 0, 1, the middle and the last of every layer, the bytes that LMCache's kernels would address by the descriptors it made
are compared with the bytes the block owns in the raw tensors. Right: all of them, and at most padding of its own page besides.
For kvreg's views formats, slots, tokens per block, strides and order must be the plan's, too, or there is no table.

LMCache gets what it gets in production, by an adapter (`tests/lmcache/peer.py`): objects of vLLM's own spec classes that answer
with the snapshot's numbers, the registered tensors, and the layout by LMCache's own translation. What differs: tensors are on
torch's `meta` device; one installed vLLM provides the spec classes for all releases, and where it lacks one, the class of the
kind; slots of TurboQuant, which snapshots do not record, are said to be there; the chunk is the least that all groups divide.

To be fair to LMCache: a case counts where it occurs, not by how many run it, and the cases were collected to be hard. Most
of what serves real models is right in both. A refusal is a user who is told. What is wrong are kernel pages smaller than vLLM's
blocks, in models without recurrent state (it edits hybrids only) and TurboQuant's: it takes such pages for compressed ones and
copies one of several. And layers of one shape whose blocks are differently far apart: it copies them all by one stride.

Of {cases} registrations LMCache alone is right in {right} and silently wrong in {wrong}; the rest it refuses.
"""

REASONS = """
What LMCache said, or what was wrong with the bytes; one example for each:

| | kind of layer | cases | example |
|---|---|---|---|"""

if __name__ == "__main__":
    main()
