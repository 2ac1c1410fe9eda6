"""Small offers over real memory, for tests of everything that comes after the stages."""

import torch

from stages.model import CacheTensor, Engine, Kind, LayerCache, LeafSpec, Offer, OfferedGroup, Worker

BLOCK, KERNEL, HEADS, CONTENT = 12, 4, 2, 8
PAGE_BYTES = BLOCK * HEADS * CONTENT * 2
STATE_BYTES = PAGE_BYTES - 40


def cache(tensor: torch.Tensor) -> CacheTensor:
    """A tensor with the storage it is cut from."""
    storage = tensor.untyped_storage()
    return CacheTensor(tensor, str(storage._cdata), storage.nbytes())


def hybrid(num_blocks: int = 6, layout: str = "NHD", rank: int = 0, mode: str = "align", device: str = "cpu") -> Offer:
    """Two layers of recurrent state in one padded page, and two of attention paged three kernel blocks to a block.

    The groups overlay each other from byte 0, as an engine's do: a block id belongs to one of them at a time.
    """
    state = LeafSpec(Kind.MAMBA, BLOCK, PAGE_BYTES, 1, STATE_BYTES, mamba_cache_mode=mode)
    attention = LeafSpec(Kind.FULL_ATTENTION, BLOCK, PAGE_BYTES, BLOCK, PAGE_BYTES)
    caches: dict[str, LayerCache] = {}
    for index in range(2):
        memory = torch.zeros(num_blocks * PAGE_BYTES, dtype=torch.uint8, device=device)
        unified = memory.view(torch.int8).as_strided((num_blocks, 1, 1, STATE_BYTES), (PAGE_BYTES, STATE_BYTES, STATE_BYTES, 1))
        caches[f"l.{index}.state"] = LayerCache((cache(unified),))
        token_major = layout in ("NHD", "LBNHC")
        pages = memory.view(torch.bfloat16).view((-1, KERNEL, HEADS, CONTENT) if token_major else (-1, HEADS, KERNEL, CONTENT))
        caches[f"l.{index}.attn"] = LayerCache((cache(pages.transpose(1, 2) if token_major else pages),))
    return Offer(
        Engine("test", "0"),
        (
            OfferedGroup(("l.0.state", "l.1.state"), num_blocks, dict.fromkeys(("l.0.state", "l.1.state"), state)),
            OfferedGroup(("l.0.attn", "l.1.attn"), num_blocks, dict.fromkeys(("l.0.attn", "l.1.attn"), attention)),
        ),
        caches,
        layout,
        model_name="hybrid",
        worker=Worker(rank, 8),
    )


def fill(offer: Offer, seed: int) -> None:
    """Random bytes in all of an offer's memory."""
    generator = torch.Generator().manual_seed(seed)
    for memory in memories(offer):
        memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8, generator=generator))


def memories(offer: Offer) -> list[torch.Tensor]:
    """Each storage of an offer once, whole, as bytes."""
    storages = {part.storage: part.tensor.untyped_storage() for layer in offer.caches.values() for part in layer.tensors}
    return [torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage) for storage in storages.values()]


def block_bytes(offer: Offer, group: int, block: int) -> list[bytes]:
    """The bytes of one block of each layer of a group, read through the raw tensors' own indices."""
    out = []
    for name in offer.groups[group].layer_names:
        for part in offer.caches[name].tensors:
            pages = part.tensor.shape[0] // offer.groups[group].num_blocks
            rows = part.tensor[block * pages : (block + 1) * pages]
            out.append(rows.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes())
    return out
