"""A snapshot's registration with memory under it: blocks of every group stored, overwritten, brought back and compared.

Memory is a sparse file: a plan for a terabyte of blocks takes the disk of the few that are moved. Bytes are written and
compared through the raw tensors, by the engine's own indices; what moves them knows only the edited views.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from orchestrator.backend.embedded import EmbeddedBackend
from orchestrator.pipeline import register
from stages.model import CacheTensor, EditedLayer, LayerCache, Offer, Receipt


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came back of one group: bytes that its moved blocks own, those that are right, and whether the others stayed."""

    group: int
    layers: int
    owned_bytes: int
    right_bytes: int
    untouched: bool

    @property
    def right(self) -> bool:
        """Whether every byte came back where it was wanted, and nothing else was touched."""
        return self.untouched and self.right_bytes == self.owned_bytes > 0


async def replay(offer: Offer, backend: EmbeddedBackend | None = None) -> tuple[Replayed, ...]:
    """Register an offer on memory of this machine and move a block of each group. Raises as `register` does, and OSError."""
    backend = backend or EmbeddedBackend()
    with TemporaryDirectory(prefix="kvreg-") as folder:
        receipt = await register(_with_memory(offer, Path(folder)), backend)
        moved = tuple(_moved(receipt, group, backend) for group in sorted({group.engine_group_id for group in receipt.plan.groups}))
        await backend.unregister(receipt.plan)
    return moved


def _with_memory(offer: Offer, folder: Path) -> Offer:
    """The same registration, each storage a file of its size that holds nothing yet."""
    sizes = {part.storage: part.storage_size_bytes for cache in offer.caches.values() for part in cache.tensors}
    memory = {}
    for number, (storage, size) in enumerate(sizes.items()):
        whole = -(-max(size, 1) // 16) * 16  # re-viewed in every dtype
        memory[storage] = torch.from_file(str(folder / str(number)), shared=True, size=whole, dtype=torch.uint8)

    def placed(part: CacheTensor) -> CacheTensor:
        like = part.tensor
        view = memory[part.storage].view(like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())
        return replace(part, tensor=view)

    caches = {name: LayerCache(tuple(map(placed, cache.tensors)), cache.listed) for name, cache in offer.caches.items()}
    return replace(offer, caches=caches)


def _moved(receipt: Receipt, group: int, backend: EmbeddedBackend) -> Replayed:
    """One block stored, all that is looked at overwritten, and the block brought back elsewhere."""
    layers = [layer for layer in receipt.plan.layers if layer.layer.group == group]
    last = layers[0].layer.owned.num_blocks - 1
    source, target = max(last - 1, 0), last
    for place, rows in _rows(layers, source):
        rows.copy_(_pattern(place, rows))
    backend.store(receipt.registration, group, [source], ["block"])
    others = [block for block in sorted({0, source, max(target - 2, 0)}) if block != target]
    for block in (*others, target):
        for place, rows in _rows(layers, block):
            rows.copy_(_pattern(place + 1_000_000, rows))
    backend.retrieve(receipt.registration, group, [target], ["block"])
    owned = right = 0
    for place, rows in _rows(layers, target):
        owned += rows.numel() * rows.element_size()
        right += int((_bytes(rows) == _bytes(_pattern(place, rows))).sum())
    kept = all(
        torch.equal(_bytes(rows), _bytes(_pattern(place + 1_000_000, rows))) for block in others for place, rows in _rows(layers, block)
    )
    return Replayed(group, len(layers), owned, right, kept)


def _rows(layers: list[EditedLayer], block: int) -> Iterator[tuple[int, torch.Tensor]]:
    """What a block is in each raw tensor of a group, by the tensor's own indices, with a number of its own."""
    for number, layer in enumerate(layers):
        pages = layer.layer.pages_per_block
        for index, part in enumerate(layer.layer.cache.tensors):
            yield number * 16 + index, part.tensor.narrow(layer.layer.block_dim, block * pages, pages)


def _pattern(place: int, like: torch.Tensor) -> torch.Tensor:
    """Random bytes, the same for a place whenever they are asked for."""
    size = like.numel() * like.element_size()
    drawn = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(place))
    return drawn.view(like.dtype).view(like.shape)


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """Their bytes in the order of their indices: compared as bytes, because a pattern may be no number."""
    return rows.contiguous().view(-1).view(torch.uint8)
