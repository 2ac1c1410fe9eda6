"""The proof that a transfer touches a block's own bytes: `owned(b) ⊆ planned(b) ⊆ owned(b) ∪ own padding(b)`.

`owned` comes from the raw tensors (`stages.geometry`), `planned` from the transfer's reading of the view
(`stages.pages`); no rule has a hand in either. All of it is arithmetic on the runs of block 0 and the block stride,
on metadata only: it holds for every block, reads no byte of a tensor and works on `meta` tensors.
"""

from collections.abc import Iterable, Iterator
from math import gcd
from operator import itemgetter
from typing import TypeAlias

from stages.errors import Reason, RuleRejected, reject
from stages.model import BlockRuns, EditedLayer, Layer, Run, TransferPage

_Placed: TypeAlias = tuple[int, int, EditedLayer]
"""A layer after the first and the last byte of its storage that a transfer of it may touch."""


def prove(layer: Layer, page: TransferPage) -> None:
    """Raise RuleRejected, with the numbers, unless the transfer touches exactly the layer's own blocks."""
    owned, planned, spec = layer.owned, page.planned, layer.spec
    if planned.num_blocks != owned.num_blocks:
        raise reject(Reason.BLOCK_COUNT, view_blocks=planned.num_blocks, num_blocks=owned.num_blocks)
    if spec.block_size % page.slots if spec.recurrent else page.slots != spec.slots_per_block:
        raise reject(
            Reason.SLOTS_PER_BLOCK, view_slots=page.slots, slots_per_block=spec.slots_per_block if not spec.recurrent else spec.block_size
        )
    if owned.num_blocks == 0:
        return
    if owned.num_blocks > 1 and planned.stride_bytes != owned.stride_bytes:
        raise reject(Reason.BLOCK_STRIDE, view_stride_bytes=planned.stride_bytes, block_stride_bytes=owned.stride_bytes)
    missed = sum(run.stop - run.start for run in minus(owned.runs, planned.runs))
    if missed:
        raise reject(Reason.BYTES_MISSED, missed_bytes=missed, owned_bytes=owned.size_bytes)
    if planned.extent.start < 0 or planned.extent.stop > layer.storage_size_bytes:
        raise reject(Reason.PAST_STORAGE, end_bytes=planned.extent.stop, storage_bytes=layer.storage_size_bytes)
    for run in planned.runs:
        for other in owned.runs:
            if reaches_another_block(run, other, owned.stride_bytes, owned.num_blocks):
                raise reject(Reason.BYTES_OF_ANOTHER_BLOCK, planned_bytes=planned.size_bytes, block_stride_bytes=owned.stride_bytes)
    padding = (Run(owned.start, owned.start + spec.page_size_bytes),)
    beyond = sum(run.stop - run.start for run in minus(minus(planned.runs, owned.runs), padding))
    if beyond:
        raise reject(Reason.BYTES_BEYOND_PADDING, beyond_bytes=beyond, page_size_bytes=spec.page_size_bytes)


def overlapping(layers: Iterable[EditedLayer]) -> Iterator[tuple[EditedLayer, RuleRejected]]:
    """Layers whose planned bytes reach a layer that is live under the same block ids (one group, one storage).

    Layers of different groups may overlay each other: a block id belongs to one group at a time.
    """
    shared: dict[tuple[int, str], list[_Placed]] = {}
    for edited in layers:
        layer, planned = edited.layer, edited.paging.page.planned
        if planned.num_blocks:
            placed = (layer.begin_bytes + planned.extent.start, layer.begin_bytes + planned.extent.stop, edited)
            shared.setdefault((layer.group, layer.cache.tensors[0].storage), []).append(placed)
    for group in shared.values():
        for entangled in _entangled(group):
            if not _all_apart([edited for *_, edited in entangled]):
                yield from _overlapping_among(entangled)


def minus(runs: tuple[Run, ...], others: tuple[Run, ...]) -> tuple[Run, ...]:
    """The bytes of `runs` that are in none of `others`."""
    left = list(runs)
    for other in others:
        left = [
            piece
            for run in left
            for piece in (Run(run.start, min(run.stop, other.start)), Run(max(run.start, other.stop), run.stop))
            if piece.start < piece.stop
        ]
    return tuple(left)


def reaches_another_block(run: Run, other: Run, stride_bytes: int, num_blocks: int) -> bool:
    """Whether `run` of block b meets `other` of a block b' ≠ b: whether `other + k * stride` meets it for some k ≠ 0."""
    if num_blocks < 2:
        return False
    if stride_bytes == 0:  # all blocks in one place
        return run.start < other.stop and other.start < run.stop
    # other + k*stride meets run for run.start - other.stop < k*stride < run.stop - other.start
    lowest = max((run.start - other.stop) // stride_bytes + 1, 1 - num_blocks)
    highest = min(-((other.start - run.stop) // stride_bytes) - 1, num_blocks - 1)
    return lowest <= highest and (lowest, highest) != (0, 0)


def _entangled(group: list[_Placed]) -> Iterator[list[_Placed]]:
    """Layers whose extents meet, directly or through others, by where they begin. Those that meet no other are apart from all."""
    together: list[_Placed] = []
    reached = 0
    for placed in sorted(group, key=itemgetter(0)):
        start, stop, _ = placed
        if start >= reached and len(together) > 1:
            yield together
        if start >= reached or not together:
            together, reached = [placed], stop
        else:
            together.append(placed)
            reached = max(reached, stop)
    if len(together) > 1:
        yield together


def _all_apart(layers: list[EditedLayer]) -> bool:
    """Whether layers of one stride, whose blocks interleave, are apart modulo it: each run ends before the next one begins.

    One look at each run, where a pair of layers at a time is as many looks as there are pairs. False says nothing: strides
    differ, or two runs of one layer meet.
    """
    planned = [edited.paging.page.planned for edited in layers]
    period = planned[0].stride_bytes
    if period == 0 or any(blocks.stride_bytes != period for blocks in planned):
        return False
    runs = sorted(
        ((edited.layer.begin_bytes + run.start) % period, run.stop - run.start)
        for edited, blocks in zip(layers, planned, strict=True)
        for run in blocks.runs
    )
    starts = [start for start, _ in runs[1:]] + [runs[0][0] + period]
    return all(start + size <= following for (start, size), following in zip(runs, starts, strict=True))


def _overlapping_among(layers: list[_Placed]) -> Iterator[tuple[EditedLayer, RuleRejected]]:
    """Layers that cannot be shown to be apart from another, of some that are sorted by where they begin.

    Layers are apart if their extents are; layers that interleave are apart if their blocks are modulo the stride.
    """
    before: list[tuple[int, BlockRuns, EditedLayer]] = []
    told: set[str] = set()
    for start, stop, edited in layers:
        planned = edited.page.planned
        before = [other for other in before if other[0] > start]
        for _, against, other in before:
            # Either may be the one that reaches too far, so both are told, each once.
            if (edited.layer.name in told and other.layer.name in told) or _apart(planned, against):
                continue
            for one, met in ((edited, other), (other, edited)):
                if one.layer.name not in told:
                    told.add(one.layer.name)
                    yield one, reject(Reason.BYTES_OF_ANOTHER_LAYER, other_layer=met.layer.name)
        before.append((stop, planned, edited))


def _apart(one: BlockRuns, other: BlockRuns) -> bool:
    """Whether no block of `one` meets any block of `other`, judged modulo the gcd of their strides.

    Sound for all: blocks lie apart by some multiple of the gcd. Exact for equal strides and one run a block, if extents meet.
    """
    period = gcd(one.stride_bytes, other.stride_bytes)
    if period == 0:
        return False
    for run in one.runs:
        for against in other.runs:
            distance = (against.start - run.start) % period
            if distance < run.stop - run.start or distance + (against.stop - against.start) > period:
                return False
    return True
