"""The embedded backend: an in-process page store in host memory. No server, no GPU needed.

It copies by the same reading of a view that the proof judged (`TransferPage.planned`), so a byte round trip through it
shows what any transfer by that plan would move. Copies are batched: one gather per run of a layer, one host copy per
group of blocks, on CPU and CUDA tensors alike; only wide runs that lie in host memory already are copied one by one.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import gcd

import torch

from stages.errors import KVRegError, Reason, TransferRefused
from stages.geometry import byte_view
from stages.model import EditedLayer, Plan

_WIDE_BYTES = 64 * 1024
"""Runs this wide are copied one by one on the CPU: a call costs less there than moving every byte twice."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BlockIdError(KVRegError, IndexError):
    """Block ids that a group does not have, or twice in one retrieve: `(engine_group_id, offending ids, num_blocks)`."""

    def __str__(self) -> str:
        group, block_ids, num_blocks = self.args
        return f"engine group {group} has {num_blocks} blocks: cannot take block ids {block_ids}, each once and below that"


class PageMissing(KVRegError, KeyError):
    """Keys that no page is stored under: `(engine_group_id, missing keys)`."""

    def __str__(self) -> str:
        group, keys = self.args
        return f"no page is stored for engine group {group} under keys {keys}: look up before retrieving"


class NotRegistered(KVRegError, LookupError):
    """A registration or engine group the store does not hold: `(registration, engine_group_id or None)`."""

    def __str__(self) -> str:
        registration, group = self.args
        return f"registration {registration!r} has no engine group {group}: register a plan first"


@dataclass(frozen=True, slots=True, eq=False)
class _Lane:
    """One run of one layer as `[NB, words]` over the engine's own memory, and its columns in the group's pages."""

    blocks: torch.Tensor
    columns: slice


@dataclass(slots=True)
class _Registered:
    """A plan's lanes by engine group, and the pages stored from them."""

    plan: Plan
    lanes: dict[int, list[_Lane]]
    pages: dict[tuple[int, Hashable], torch.Tensor] = field(default_factory=dict)


class EmbeddedBackend:
    """A `TransferBackend` that stores pages in host memory, by engine group and the caller's key for a block's content."""

    name = "embedded"

    def __init__(self) -> None:
        self._registered: dict[str, _Registered] = {}
        self._numbers = count(1)

    async def register(self, plan: Plan) -> str:
        """Register a plan. Raises TransferRefused: ALREADY_REGISTERED for memory of another plan, NOTHING_TO_REGISTER."""
        if not plan.layers:
            raise TransferRefused(Reason.NOTHING_TO_REGISTER, {"worker": plan.offer.worker.rank})
        memory = _memory(plan)
        for registration, other in self._registered.items():
            if memory & _memory(other.plan):
                raise TransferRefused(Reason.ALREADY_REGISTERED, {"registration": registration, "worker": other.plan.offer.worker.rank})
        registration = f"{self.name}-{next(self._numbers)}"
        self._registered[registration] = _Registered(plan, _lanes(plan))
        return registration

    async def unregister(self, plan: Plan) -> None:
        """Forget a plan and drop its pages."""
        self._registered = {name: held for name, held in self._registered.items() if held.plan is not plan}

    def store(self, registration: str, engine_group_id: int, block_ids: Sequence[int], keys: Sequence[Hashable]) -> int:
        """Copy blocks of every layer of an engine group to host pages, one key a block; returns the bytes copied.

        Raises NotRegistered and BlockIdError before a byte moves.
        """
        held, lanes = self._group(registration, engine_group_id)
        ids = _ids(engine_group_id, block_ids, lanes, unique=False)
        places = [(engine_group_id, key) for _, key in zip(block_ids, keys, strict=True)]
        if _one_by_one(lanes):
            # A page that its key holds already is written over: memory that is new to the process costs more than the copy.
            new = list(dict.fromkeys(place for place in places if place not in held.pages))
            held.pages.update(zip(new, torch.empty((len(new), _width(lanes)), dtype=lanes[0].blocks.dtype).unbind(), strict=True))
            for block_id, place in zip(block_ids, places, strict=True):
                for run, part in _beside(lanes, block_id, held.pages[place]):
                    part.copy_(run)
            return sum(held.pages[place].nbytes for place in places)
        pages = torch.empty((len(places), _width(lanes)), dtype=lanes[0].blocks.dtype, device=ids.device)
        for lane in lanes:
            torch.index_select(lane.blocks, 0, ids, out=pages[:, lane.columns])  # once over the bytes, where `[:] =` is twice
        held.pages.update(zip(places, pages.cpu().unbind(), strict=True))
        return pages.nbytes

    def retrieve(self, registration: str, engine_group_id: int, block_ids: Sequence[int], keys: Sequence[Hashable]) -> int:
        """Copy stored pages into blocks, which need not be those they came from; returns the bytes copied.

        Raises NotRegistered, BlockIdError and PageMissing before a byte moves.
        """
        held, lanes = self._group(registration, engine_group_id)
        ids = _ids(engine_group_id, block_ids, lanes, unique=True)
        places = [(engine_group_id, key) for _, key in zip(block_ids, keys, strict=True)]
        missing = [key for group, key in places if (group, key) not in held.pages]
        if missing:
            raise PageMissing(engine_group_id, missing)
        pages = [held.pages[place] for place in places]
        if _one_by_one(lanes):
            for block_id, page in zip(block_ids, pages, strict=True):
                for run, part in _beside(lanes, block_id, page):
                    run.copy_(part)
        elif pages:
            together = torch.stack(pages).to(ids.device)
            for lane in lanes:
                lane.blocks.index_copy_(0, ids, together[:, lane.columns])
        return sum(page.nbytes for page in pages)

    def stored(self, registration: str, engine_group_id: int, keys: Sequence[Hashable]) -> list[bool]:
        """For each key, whether a page is stored under it."""
        held, _ = self._group(registration, engine_group_id)
        return [(engine_group_id, key) in held.pages for key in keys]

    def _group(self, registration: str, engine_group_id: int) -> tuple[_Registered, list[_Lane]]:
        held = self._registered.get(registration)
        if held is None or engine_group_id not in held.lanes:
            raise NotRegistered(registration, engine_group_id)
        return held, held.lanes[engine_group_id]


def _memory(plan: Plan) -> frozenset[int]:
    """The storages a plan is cut from."""
    return frozenset(layer.view.untyped_storage()._cdata for layer in plan.layers)


def _lanes(plan: Plan) -> dict[int, list[_Lane]]:
    """Every run of every layer, by engine group, laid side by side in that group's pages."""
    members: dict[int, list[EditedLayer]] = {}
    for layer in plan.layers:
        members.setdefault(layer.layer.group, []).append(layer)
    lanes: dict[int, list[_Lane]] = {}
    for group, layers in members.items():
        beside = lanes.setdefault(group, [])
        for blocks in _runs(layers):
            left = _width(beside)
            beside.append(_Lane(blocks, slice(left, left + blocks.shape[1])))
    return lanes


def _runs(layers: list[EditedLayer]) -> Iterator[torch.Tensor]:
    """The planned runs of a group's layers as `[NB, words]`: block b's row starts b strides after the run's first byte.

    Words are the widest integers that every run's address, stride and length divide by, which makes the same gather cheaper.
    """
    blocks = [(layer.view, layer.page.planned, run) for layer in layers for run in layer.page.planned.runs]
    word = _WORDS[gcd(8, *(number for _, planned, run in blocks for number in (planned.stride_bytes, run.start, run.stop)))]
    for view, planned, run in blocks:
        shape = (planned.num_blocks, run.stop - run.start)
        yield byte_view(view, shape, (planned.stride_bytes, 1), run.start).view(word)


def _one_by_one(lanes: list[_Lane]) -> bool:
    """Whether a group's runs are copied without a gather: all in host memory, and all wide."""
    return all(lane.blocks.device.type == "cpu" and lane.blocks.shape[1] * lane.blocks.element_size() >= _WIDE_BYTES for lane in lanes)


def _beside(lanes: list[_Lane], block_id: int, page: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each run of a block, `[words]` of the engine's memory, and its part of the page."""
    parts = page.split([lane.blocks.shape[1] for lane in lanes])
    return zip([lane.blocks.select(0, block_id) for lane in lanes], parts, strict=True)


def _width(lanes: list[_Lane]) -> int:
    return lanes[-1].columns.stop if lanes else 0


def _ids(engine_group_id: int, block_ids: Sequence[int], lanes: list[_Lane], *, unique: bool) -> torch.Tensor:
    """Block ids on the lanes' device, checked: within the group, and for a retrieve each once."""
    num_blocks = lanes[0].blocks.shape[0]
    wrong = [block_id for block_id in block_ids if not 0 <= block_id < num_blocks]
    if unique and not wrong and len(set(block_ids)) != len(block_ids):
        wrong = sorted({block_id for block_id in block_ids if list(block_ids).count(block_id) > 1})
    if wrong:
        raise BlockIdError(engine_group_id, wrong, num_blocks)
    return torch.tensor(list(block_ids), dtype=torch.int64, device=lanes[0].blocks.device)
