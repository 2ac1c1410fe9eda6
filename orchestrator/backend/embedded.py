"""The embedded backend: an in-process page store in host memory. No server, no GPU needed.

It copies by the same reading of a view that the proof judged (`TransferPage.planned`), so a byte round trip through it
shows what any transfer by that plan would move. Copies are batched: one gather per run of a layer, one host copy per
group of blocks, on CPU and CUDA tensors alike.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import gcd

import torch

from stages.errors import KVRegError, Reason, TransferRefused
from stages.geometry import byte_view
from stages.model import EditedLayer, Plan

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


@dataclass(frozen=True, slots=True)
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
        pages = torch.empty((len(keys), _width(lanes)), dtype=lanes[0].blocks.dtype, device=ids.device)
        for lane in lanes:
            pages[:, lane.columns] = lane.blocks.index_select(0, ids)
        for key, page in zip(keys, pages.cpu().unbind(), strict=True):
            held.pages[engine_group_id, key] = page
        return pages.nbytes

    def retrieve(self, registration: str, engine_group_id: int, block_ids: Sequence[int], keys: Sequence[Hashable]) -> int:
        """Copy stored pages into blocks, which need not be those they came from; returns the bytes copied.

        Raises NotRegistered, BlockIdError and PageMissing before a byte moves.
        """
        held, lanes = self._group(registration, engine_group_id)
        ids = _ids(engine_group_id, block_ids, lanes, unique=True)
        missing = [key for key in keys if (engine_group_id, key) not in held.pages]
        if missing:
            raise PageMissing(engine_group_id, missing)
        pages = torch.stack([held.pages[engine_group_id, key] for key in keys]).to(ids.device) if keys else ids.new_empty(0)
        for lane in lanes if keys else ():
            lane.blocks.index_copy_(0, ids, pages[:, lane.columns])
        return pages.nbytes

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
