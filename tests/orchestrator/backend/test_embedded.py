"""The embedded page store, judged through the raw tensors' own indices."""

import pytest
import torch

from orchestrator.backend.embedded import BlockIdError, EmbeddedBackend, NotRegistered, PageMissing
from orchestrator.pipeline import register
from orchestrator.portal import run_sync
from stages.errors import Reason, TransferRefused
from stages.model import CacheTensor, Engine, Kind, LayerCache, LeafSpec, Offer, OfferedGroup, Receipt
from tests.offers import block_bytes, fill, hybrid, memories


def registered(offer: Offer, backend: EmbeddedBackend) -> Receipt:
    """The receipt of an offer taken through the pipeline."""
    return run_sync(lambda: register(offer, backend))


@pytest.fixture
def backend() -> EmbeddedBackend:
    """An empty store."""
    return EmbeddedBackend()


@pytest.mark.parametrize("layout", ["NHD", "HND", "LBNHC", "LBHNC"])
@pytest.mark.parametrize("group", [0, 1])
def test_blocks_come_back_into_other_blocks_byte_for_byte(backend: EmbeddedBackend, layout: str, group: int) -> None:
    """A page stored from blocks 1, 4 and retrieved into 5, 0 is there; every other byte of the engine is untouched."""
    offer = hybrid(layout=layout)
    receipt = registered(offer, backend)
    fill(offer, 1)
    wanted = [block_bytes(offer, group, block) for block in (1, 4)]
    assert backend.store(receipt.registration, group, [1, 4], ["a", "b"]) > 0
    fill(offer, 2)
    others = {block: block_bytes(offer, group, block) for block in (1, 2, 3, 4)}
    backend.retrieve(receipt.registration, group, [5, 0], ["a", "b"])
    assert [block_bytes(offer, group, block) for block in (5, 0)] == wanted
    assert {block: block_bytes(offer, group, block) for block in others} == others


def test_wide_blocks_come_back_too_and_a_page_is_written_over(backend: EmbeddedBackend) -> None:
    """Blocks of 64 KiB, which are copied one by one: the later of two stores under a key is what comes back, and nothing else changes."""
    memory = torch.randint(0, 256, (2, 4, 16, 4096), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    spec = LeafSpec(Kind.MLA_ATTENTION, 16, memory[0, 0].nbytes, 16)
    caches = {f"layer {layer}": LayerCache((CacheTensor(memory[layer], "all", memory.nbytes),)) for layer in range(2)}
    offer = Offer(Engine("test", "0"), (OfferedGroup(tuple(caches), 4, dict.fromkeys(caches, spec)),), caches, "NHD")
    registration = registered(offer, backend).registration
    expected = memory.clone()
    expected[:, 3], expected[:, 2] = memory[:, 1], memory[:, 0]
    backend.store(registration, 0, [2, 0], ["a", "b"])
    assert backend.store(registration, 0, [1], ["a"]) == backend.retrieve(registration, 0, [3], ["a"]) == 2 * spec.page_size_bytes
    backend.retrieve(registration, 0, [2], ["b"])
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("keys", [["a"], ["a", "b", "c"]])
def test_as_many_keys_as_blocks_or_nothing_moves(backend: EmbeddedBackend, keys: list[str]) -> None:
    """A list of keys that is longer or shorter than that of blocks is an error of the caller, before a page is stored."""
    receipt = registered(hybrid(), backend)
    with pytest.raises(ValueError, match="zip"):
        backend.store(receipt.registration, 1, [1, 2], keys)
    assert not any(backend.stored(receipt.registration, 1, keys))
    backend.store(receipt.registration, 1, [1, 2, 3], ["a", "b", "c"])
    with pytest.raises(ValueError, match="zip"):
        backend.retrieve(receipt.registration, 1, [1, 2], keys)


def test_a_page_is_stored_under_its_group_alone(backend: EmbeddedBackend) -> None:
    """The same key in two groups means two pages: block ids mean nothing outside their group."""
    offer = hybrid()
    receipt = registered(offer, backend)
    backend.store(receipt.registration, 0, [2], ["key"])
    assert backend.stored(receipt.registration, 0, ["key", "other"]) == [True, False]
    assert backend.stored(receipt.registration, 1, ["key"]) == [False]


@pytest.mark.parametrize("block_ids", [[6], [-1], [0, 99]])
def test_a_block_id_out_of_bounds_moves_nothing(backend: EmbeddedBackend, block_ids: list[int]) -> None:
    """An id the group does not have is refused by name before a byte moves, storing and retrieving."""
    offer = hybrid()
    receipt = registered(offer, backend)
    fill(offer, 3)
    before = [memory.clone() for memory in memories(offer)]
    keys = [f"key-{block_id}" for block_id in block_ids]
    with pytest.raises(BlockIdError, match="6 blocks"):
        backend.store(receipt.registration, 1, block_ids, keys)
    with pytest.raises(BlockIdError, match="6 blocks"):
        backend.retrieve(receipt.registration, 1, block_ids, keys)
    assert backend.stored(receipt.registration, 1, keys) == [False] * len(keys)
    assert all(torch.equal(*pair) for pair in zip(before, memories(offer), strict=True))


def test_two_pages_into_one_block_are_refused(backend: EmbeddedBackend) -> None:
    """Which of the two would win is undefined, so neither is copied."""
    receipt = registered(hybrid(), backend)
    backend.store(receipt.registration, 1, [1, 2], ["a", "b"])
    with pytest.raises(BlockIdError):
        backend.retrieve(receipt.registration, 1, [3, 3], ["a", "b"])


def test_a_missing_page_moves_nothing(backend: EmbeddedBackend) -> None:
    """One unknown key among known ones: the known pages are not half-retrieved."""
    offer = hybrid()
    receipt = registered(offer, backend)
    backend.store(receipt.registration, 1, [1], ["a"])
    fill(offer, 4)
    before = [memory.clone() for memory in memories(offer)]
    with pytest.raises(PageMissing, match="gone"):
        backend.retrieve(receipt.registration, 1, [1, 2], ["a", "gone"])
    assert all(torch.equal(*pair) for pair in zip(before, memories(offer), strict=True))


def test_registering_memory_twice_keeps_the_first(backend: EmbeddedBackend) -> None:
    """A second plan over the same memory is refused for good, and the first still works."""
    offer = hybrid()
    receipt = registered(offer, backend)
    backend.store(receipt.registration, 1, [1], ["a"])
    with pytest.raises(TransferRefused) as refused:
        registered(offer, backend)
    assert refused.value.reason is Reason.ALREADY_REGISTERED
    assert not refused.value.retryable
    assert backend.retrieve(receipt.registration, 1, [2], ["a"]) > 0


def test_an_unregistered_plan_is_forgotten_with_its_pages(backend: EmbeddedBackend) -> None:
    """After unregistering, the registration is unknown, and the same memory may be registered anew."""
    offer = hybrid()
    receipt = registered(offer, backend)
    run_sync(lambda: backend.unregister(receipt.plan))
    run_sync(lambda: backend.unregister(receipt.plan))
    with pytest.raises(NotRegistered):
        backend.store(receipt.registration, 1, [1], ["a"])
    again = registered(offer, backend)
    assert again.registration != receipt.registration
    assert backend.stored(again.registration, 1, ["a"]) == [False]


def test_nothing_asked_moves_nothing(backend: EmbeddedBackend) -> None:
    """Empty lists of blocks are no error."""
    receipt = registered(hybrid(), backend)
    assert backend.store(receipt.registration, 1, [], []) == 0
    assert backend.retrieve(receipt.registration, 1, [], []) == 0


def test_an_unknown_group_is_refused(backend: EmbeddedBackend) -> None:
    """A group the plan does not have is named."""
    receipt = registered(hybrid(), backend)
    with pytest.raises(NotRegistered, match="group 7"):
        backend.store(receipt.registration, 7, [1], ["a"])
