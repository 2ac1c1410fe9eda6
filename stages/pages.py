"""What a transfer reads from a registered view, and the views it reads rightly.

LMCache learns a page's slots, heads and width from a view's shape after sorting its dims by stride, and copies whole
runs of bytes by that reading: a view whose sorted order is not the one meant moves other bytes than its indices say.
`read_page` is that reading (LMCache 0.5.6; the embedded backend copies by it too), so the proof and the transfer
judge one and the same thing. Sorting cannot tell heads from slots: the layout the engine named decides.
"""

from math import prod

import torch

from stages.errors import Reason, reject
from stages.geometry import byte_view
from stages.model import BlockRuns, Layer, Layout, PageFormat, Run, TransferPage

VECTOR_WIDTHS_BYTES = (16, 8, 4, 2, 1)
"""Widths the transfer kernels copy by; the widest that divides a row is used, so a synthetic width is rounded up to it."""

_INDEXER_COLUMNS = 132  # 128 fp8 values and one fp32 scale a slot, kept as [slots x 128 | slots x 4] in each page

_FIVE = {
    (True, False): PageFormat.KV_FIRST_NHD,
    (True, True): PageFormat.KV_FIRST_HND,
    (False, False): PageFormat.BLOCK_FIRST_NHD,
    (False, True): PageFormat.BLOCK_FIRST_HND,
}


def read_page(view: torch.Tensor, layout: Layout) -> TransferPage | None:
    """The transfer's reading of a view of rank 3, 4 or 5, or None where it has no format for it.

    Rank 3 `[NB, BS, W]`; rank 4 `[NB, BS, H, W]` or, heads first, `[NB, H, BS, W]`; rank 5 `[2, NB, …]` and
    `[NB, 2, …]` likewise, `shape[0] == 2` being tried first. Dims here are those of the sorted view.
    """
    sorted_dims = _in_memory_order(view)
    if sorted_dims is None:
        return None
    shape, stride = sorted_dims
    if len(shape) == 3:
        indexer = view.dtype is torch.uint8 and shape[2] == _INDEXER_COLUMNS
        return _page(view, PageFormat.MLA_INDEXER if indexer else PageFormat.MLA, shape, stride, slots=1, heads=None)
    if len(shape) == 4:
        heads = 1 if layout.heads_first else 2
        if shape[heads] == 1 and view.dtype is torch.uint8 and shape[3] == _INDEXER_COLUMNS:
            return _page(view, PageFormat.MLA_INDEXER, shape, stride, slots=3 - heads, heads=None)
        return _page(view, PageFormat.HND if layout.heads_first else PageFormat.NHD, shape, stride, slots=3 - heads, heads=heads)
    if len(shape) == 5 and 2 in shape[:2] and stride[0] == prod(shape[1:]):  # K/V formats know no padding
        heads = 2 if layout.heads_first else 3
        return _page(view, _FIVE[shape[0] == 2, layout.heads_first], shape, stride, slots=5 - heads, heads=heads)
    return None


def opaque_page(layer: Layer, layout: Layout, dtype: torch.dtype, slots: int, width: int, heads: int = 1) -> torch.Tensor:
    """`[NB, slots, H, W]`, heads first `[NB, H, slots, W]`: each block one opaque run from the first byte it owns.

    Heads are synthetic and slots are equal shares of the page, whatever is stored there; other heads are the same bytes
    under another transfer identity. Rank 4, because of a rank-5 view of two blocks the transfer takes the blocks for K and V.
    """
    item, owned = dtype.itemsize, layer.owned
    content = slots * heads * width * item
    # One block needs no stride, and the transfer misreads a padded one: it divides the bytes it sees by it.
    step = owned.stride_bytes if owned.num_blocks > 1 else content
    inner = (width * slots * item, width * item) if layout.heads_first else (width * heads * item, width * item)
    shape = (owned.num_blocks, *((heads, slots) if layout.heads_first else (slots, heads)), width * item)
    # (NB - 1) * step + content bytes from the first owned byte; as_strided raises where that leaves the storage.
    return byte_view(layer.raw, shape, (step, *inner, 1), owned.start).view(dtype)


def two_plane_page(layer: Layer, layout: Layout) -> torch.Tensor:
    """`[2, NB, slots, 1, W]`, heads first `[2, NB, 1, slots, W]`: K and V planes, each block one opaque run in each."""
    raw, slots = layer.raw, layer.spec.slots_per_block
    keys, values = layer.owned.runs
    step, item = layer.owned.stride_bytes // raw.element_size(), raw.element_size()
    width, rest = divmod(keys.stop - keys.start, slots * item)
    if rest:
        raise reject(Reason.WIDTH, plane_bytes=keys.stop - keys.start, slots_per_block=slots)
    inner = (slots * width, width) if layout.heads_first else (width, width)
    shape = (2, layer.owned.num_blocks, *((1, slots) if layout.heads_first else (slots, 1)), width)
    # Plane 0 starts at K of block 0, plane 1 at V of block 0: the distance between the two runs.
    return raw.as_strided(shape, ((values.start - keys.start) // item, step, *inner, 1), keys.start // item)


def room_bytes(layer: Layer) -> int:
    """Bytes a view may cover from the first byte a block owns: own padding, but not past the storage's end.

    The last page may be tight, so the storage bounds all of them: a view has one width.
    """
    owned = layer.owned
    last = owned.start + max(owned.num_blocks - 1, 0) * owned.stride_bytes
    step = owned.stride_bytes if owned.num_blocks > 1 else layer.spec.page_size_bytes
    return min(layer.spec.page_size_bytes, step, layer.storage_size_bytes - last)


def width_bytes(content_bytes: int, slots: int, room: int) -> int | None:
    """The bytes of one of `slots` equal shares of a page, rounded up to the widest copy its room allows; None if none fits."""
    for vector in VECTOR_WIDTHS_BYTES:
        width = -(-content_bytes // (slots * vector)) * vector
        if width * slots <= room:
            return width
    return None


def _in_memory_order(view: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shape and stride with dims from largest stride to smallest; None if the transfer cannot read such a view.

    Of tied dims those of size 1 go innermost. Every dim but the first must be dense. Of a view that is dense
    throughout the shape is taken from the strides, which differs where a size-1 dim has a stride of its own.
    """
    if view.ndim < 2:
        return None
    dims = sorted(zip(view.stride(), view.shape, strict=True), key=lambda dim: (dim[0], dim[1] != 1), reverse=True)
    stride, shape = tuple(step for step, _ in dims), tuple(size for _, size in dims)
    tight = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    if all(size == 1 or step == dense for size, step, dense in zip(shape, stride, tight, strict=True)):
        bounds = (prod(shape), *stride)
        if 0 in stride:
            return None
        shape = tuple(outer // inner for outer, inner in zip(bounds, stride, strict=False))
        return (shape, stride) if prod(shape) == view.numel() else None
    return (shape, stride) if stride[1:] == tight[1:] and stride[0] >= tight[0] else None


def _page(
    view: torch.Tensor, page_format: PageFormat, shape: tuple[int, ...], stride: tuple[int, ...], *, slots: int, heads: int | None
) -> TransferPage:
    """The page of a sorted view; `slots` and `heads` are dims of it."""
    item, start = view.element_size(), int(view.storage_offset()) * view.element_size()
    kv_first = page_format in {PageFormat.KV_FIRST_NHD, PageFormat.KV_FIRST_HND}
    block = int(kv_first)
    size = prod(shape[block + 1 :]) * item
    planes = [start, start + stride[0] * item] if kv_first else [start]
    planned = BlockRuns(tuple(Run(plane, plane + size) for plane in planes), stride[block] * item, shape[block])
    number = shape[heads] if heads is not None else 1
    return TransferPage(page_format, view.dtype, 2 if len(shape) == 5 else 1, number, shape[-1], shape[slots], planned)
