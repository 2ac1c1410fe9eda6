"""What a rule is, and the two edits most rules share."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from stages.errors import Reason, RuleRejected, reject
from stages.model import Layer, Layout
from stages.pages import opaque_page, read_page, room_bytes, two_plane_page, width_bytes
from stages.proof import prove


@dataclass(frozen=True, slots=True)
class Edit:
    """A rule's result: a view of the layer's own storage, which of its dims counts blocks, and whether it is opaque."""

    view: torch.Tensor
    block_dim: int = 0
    opaque: bool = True


@dataclass(frozen=True, slots=True)
class Rule:
    """One structural edit. `matches` looks (kind, rank, shape, stride; never names); `apply` returns a view or raises RuleRejected."""

    name: str
    summary: str
    matches: Callable[[Layer, Layout], bool]
    apply: Callable[[Layer, Layout], Edit]


def reads_well(view: torch.Tensor, layer: Layer, layout: Layout) -> bool:
    """Whether the transfer would read a view as this layer's blocks, slots and bytes; then no other page is needed."""
    page = read_page(view, layout)
    try:
        if page is not None:
            prove(layer, page)
    except RuleRejected:
        return False
    return page is not None


def attention_view(layer: Layer, layout: Layout) -> Edit:
    """One block id's kernel pages as one page: true to the layout where its slots are in token order, else opaque.

    `[n*r, s, …] -> [n, r*s, …]` where a kernel page ends at its last slot, so that pages merge into slots;
    otherwise `[n, slots, 1, W]` (heads first: `[n, 1, slots, W]`), or the same under K and V planes.
    """
    dense = merged_pages(layer)
    if dense is not None and reads_well(dense, layer, layout):
        return Edit(dense, layer.block_dim, opaque=False)
    if len(layer.owned.runs) == 1:
        return opaque_view(layer, layout)
    if len(layer.owned.runs) == 2 and layer.block_dim == 1:
        return Edit(two_plane_page(layer, layout), block_dim=1)
    if layer.pages_per_block > 1:
        raise reject(Reason.PADDED_KERNEL_PAGES, pages_per_block=layer.pages_per_block, runs=len(layer.owned.runs))
    raise reject(Reason.SCATTERED_BLOCK, runs=len(layer.owned.runs))


def opaque_view(layer: Layer, layout: Layout) -> Edit:
    """Each block's one run as `slots` equal shares, in the raw dtype if they divide, else in bytes rounded up into padding."""
    slots, content = layer.spec.slots_per_block, layer.owned.size_bytes
    item = layer.raw.element_size()
    if content % (slots * item) == 0:
        return Edit(opaque_page(layer, layout, layer.raw.dtype, slots, content // (slots * item)))
    width = width_bytes(content, slots, room_bytes(layer))
    if width is None:
        raise reject(Reason.WIDTH, content_bytes=content, room_bytes=room_bytes(layer), slots_per_block=slots)
    return Edit(opaque_page(layer, layout, torch.int8, slots, width))


def merged_pages(layer: Layer) -> torch.Tensor | None:
    """The raw tensor with each block's kernel pages merged along their slots, or None where pages do not end at a slot.

    Same rank and dim order: the block dim goes `P -> NB`, the slots dim `s -> r*s`. A dim of size 1 before the slots
    (the single head of MLA) is given the stride of the merged page, so that dims sort as the layout means them. A
    single page needs no stride, and is given a tight one: the transfer divides the bytes it sees by it.
    """
    raw, ratio, block = layer.raw, layer.pages_per_block, layer.block_dim
    step = raw.stride(block) if raw.shape[block] > 1 else prod(raw.shape[block:])
    slots = next(
        (
            dim
            for dim in range(raw.ndim)
            if dim != block and raw.shape[dim] * ratio == layer.spec.num_states and raw.shape[dim] * raw.stride(dim) == step
        ),
        None,
    )
    if slots is None and ratio > 1:
        return None
    shape, stride = list(raw.shape), list(raw.stride())
    stride[block] = step * ratio
    if slots is not None:
        shape[block], shape[slots] = shape[block] // ratio, shape[slots] * ratio
    for dim in range(block + 1, slots or block):
        if shape[dim] == 1 and stride[dim] >= step:
            stride[dim] = stride[block]
    # r pages of s slots, each `step = s * stride[slots]` long, follow one another: slot r*s ends where block 1 starts.
    return raw.as_strided(shape, stride)
