"""The promise on real memory: every block of a worker stored, everything scrambled, every block brought back elsewhere.

There are two outcomes: the worker is refused and nothing has changed, or every byte a block owns is back where it was wanted
and no other byte has changed but the block's own padding. Whose a byte is comes from `tests.stages.judge`, which indexes the
raw tensors; what moves the bytes knows only the plan. A third outcome is an error.
"""

from collections.abc import Mapping, Sequence

import torch

from orchestrator.backend.embedded import EmbeddedBackend
from orchestrator.pipeline import register
from orchestrator.portal import run_sync
from stages.errors import REASONS, RegistrationRejected, TransferRefused
from stages.model import Offer, Receipt
from tests.stages.judge import NOBODY, judge, owned, owners, transferred
from tests.stages.worlds import World

Memory = Mapping[str, torch.Tensor]
"""The bytes of each storage, the engine's own memory."""


def promise_kept(world: World) -> tuple[str, ...]:
    """Register a worker and move all its blocks; the reasons if it was refused, none if it was served. Raises AssertionError."""
    offer, backend = world.offer("cpu"), EmbeddedBackend()
    memory = _memory(offer)
    _fill(memory)
    before = _copy(memory)
    try:
        receipt = run_sync(lambda: register(offer, backend))
    except RegistrationRejected as refused:
        _assert_told(world, refused)
        assert _equal(memory, before), "a refused registration changed the engine's memory"
        return tuple(rejection.reason for rejection in refused.rejections)
    except TransferRefused as nothing:
        assert not transferred(world), "a worker with layers to transfer was told that it has none"
        return (nothing.reason,)
    assert _equal(memory, before), "a registration changed the engine's memory"
    judge(world, receipt.plan)
    for group in {group.engine_group_id for group in receipt.plan.groups}:
        _assert_moved(world, memory, backend, receipt, group)
    return ()


def _assert_told(world: World, refused: RegistrationRejected) -> None:
    """A refusal has facts and a hint, and names layers of this worker; only a layout concerns all of them at once."""
    names = {laid.name for laid in world.layers} | {name for group in world.groups for name in group.layer_names}
    for rejection in refused.rejections:
        assert rejection.reason in REASONS[rejection.stage]
        assert rejection.hint
        assert set(rejection.layer_names) <= names
        assert rejection.layer_names or rejection.facts


def _assert_moved(world: World, memory: Memory, backend: EmbeddedBackend, receipt: Receipt, group: int) -> None:
    """One group's blocks stored, lost and brought back into other blocks in two halves, each judged before the next.

    Group by group, since groups overlay each other: a block id belongs to one of them at a time.
    """
    expected = transferred(world)
    layers = [laid for laid in world.layers if expected.get(laid.name, (None,))[0] == group]
    num_blocks = expected[layers[0].name][1]
    whose = {key: owners(world, group, key, expected) for key in {laid.cuts[0].storage for laid in layers}}
    _fill(memory)
    before = _copy(memory)
    blocks = range(num_blocks)
    moved = backend.store(receipt.registration, group, blocks, blocks)
    assert _equal(memory, before), "storing changed the engine's memory"
    for storage in memory.values():
        storage.bitwise_not_()  # so that not one byte is what it was
    wanted, may_change = _copy(memory), {key: torch.zeros(len(storage), dtype=torch.bool) for key, storage in memory.items()}
    targets = [*blocks[1::2], *blocks[::2]]
    half, brought = num_blocks // 2, 0
    for pairs in ([*zip(blocks, targets, strict=True)][:half], [*zip(blocks, targets, strict=True)][half:]):
        brought += _retrieve(backend, receipt, group, pairs)
        for laid in layers:
            storage = laid.cuts[0].storage
            for source, target in pairs:
                own = owned(world, laid, target)
                page = torch.arange(int(own[0]), min(int(own[0]) + laid.spec.page_size_bytes, len(whose[storage])))
                wanted[storage][own] = before[storage][owned(world, laid, source)]
                may_change[storage][page[whose[storage][page] == NOBODY]] = True
        for key, storage in memory.items():
            wrong = ((storage != wanted[key]) & ~may_change[key]).nonzero().flatten().tolist()
            assert not wrong, f"group {group}, blocks {pairs}: {len(wrong)} bytes of storage {key} are wrong, first {wrong[:4]}"
    assert brought == moved, "other bytes were brought back than were stored"


def _retrieve(backend: EmbeddedBackend, receipt: Receipt, group: int, pairs: Sequence[tuple[int, int]]) -> int:
    """Bring pages back: under the key of their source, into their target."""
    return backend.retrieve(receipt.registration, group, [target for _, target in pairs], [source for source, _ in pairs])


def _memory(offer: Offer) -> Memory:
    parts = [part for cache in offer.caches.values() for part in cache.tensors]
    return {part.storage: torch.empty(0, dtype=torch.uint8).set_(part.tensor.untyped_storage()) for part in parts}


def _fill(memory: Memory) -> None:
    """Random bytes, the same each time."""
    generator = torch.Generator().manual_seed(len(memory))
    for storage in memory.values():
        storage.copy_(torch.randint(0, 256, storage.shape, dtype=torch.uint8, generator=generator))


def _copy(memory: Memory) -> Memory:
    return {key: storage.clone() for key, storage in memory.items()}


def _equal(memory: Memory, other: Memory) -> bool:
    return all(torch.equal(storage, other[key]) for key, storage in memory.items())
