"""The transfer's reading of a view: format, slots, heads, width and bytes, as LMCache's table of formats has them."""

import pytest
import torch

from stages.model import BlockRuns, Layout, PageFormat, Run, TransferPage
from stages.pages import read_page

NHD, HND = Layout.NHD, Layout.HND
BF16, UINT8 = torch.bfloat16, torch.uint8


def view(shape: tuple[int, ...], stride: tuple[int, ...] | None = None, dtype: torch.dtype = BF16, offset: int = 0) -> torch.Tensor:
    """A view of memory that nothing fills."""
    memory = torch.empty(4096, dtype=dtype, device="meta")
    return memory[: torch.Size(shape).numel()].view(shape) if stride is None else memory.as_strided(shape, stride, offset)


def blocks(number: int, size: int, stride: int | None = None, start: int = 0) -> BlockRuns:
    """Blocks of one run of `size` bytes."""
    return BlockRuns((Run(start, start + size),), size if stride is None else stride, number)


def planes(number: int, size: int, stride: int, apart: int) -> BlockRuns:
    """Blocks of a run in the K plane and one in the V plane."""
    return BlockRuns((Run(0, size), Run(apart, apart + size)), stride, number)


READ: dict[str, tuple[torch.Tensor, Layout, TransferPage]] = {
    "[NB,BS,W]": (view((3, 4, 16)), NHD, TransferPage(PageFormat.MLA, BF16, 1, 1, 16, 4, blocks(3, 128))),
    "[NB,BS,W], heads first": (view((3, 4, 16)), HND, TransferPage(PageFormat.MLA, BF16, 1, 1, 16, 4, blocks(3, 128))),
    "[NB,BS,W] padded, further on": (
        view((3, 4, 16), (80, 16, 1), offset=8),
        NHD,
        TransferPage(PageFormat.MLA, BF16, 1, 1, 16, 4, blocks(3, 128, 160, 16)),
    ),
    "an indexer": (view((3, 4, 132), dtype=UINT8), NHD, TransferPage(PageFormat.MLA_INDEXER, UINT8, 1, 1, 132, 4, blocks(3, 528))),
    "as wide as an indexer": (view((3, 4, 132)), NHD, TransferPage(PageFormat.MLA, BF16, 1, 1, 132, 4, blocks(3, 1056))),
    "an indexer's dtype": (view((3, 4, 128), dtype=UINT8), NHD, TransferPage(PageFormat.MLA, UINT8, 1, 1, 128, 4, blocks(3, 512))),
    "an indexer of one head": (
        view((3, 4, 1, 132), dtype=UINT8),
        NHD,
        TransferPage(PageFormat.MLA_INDEXER, UINT8, 1, 1, 132, 4, blocks(3, 528)),
    ),
    "an indexer of one head, heads first": (
        view((3, 1, 4, 132), dtype=UINT8),
        HND,
        TransferPage(PageFormat.MLA_INDEXER, UINT8, 1, 1, 132, 4, blocks(3, 528)),
    ),
    "as wide as an indexer, of two heads": (
        view((3, 4, 2, 132), dtype=UINT8),
        NHD,
        TransferPage(PageFormat.NHD, UINT8, 1, 2, 132, 4, blocks(3, 1056)),
    ),
    "as wide as an indexer, of one head": (view((3, 4, 1, 132)), NHD, TransferPage(PageFormat.NHD, BF16, 1, 1, 132, 4, blocks(3, 1056))),
    "an indexer's dtype, of one head": (
        view((3, 4, 1, 128), dtype=UINT8),
        NHD,
        TransferPage(PageFormat.NHD, UINT8, 1, 1, 128, 4, blocks(3, 512)),
    ),
    "[NB,BS,H,W]": (view((3, 4, 2, 16)), NHD, TransferPage(PageFormat.NHD, BF16, 1, 2, 16, 4, blocks(3, 256))),
    "[NB,H,BS,W]": (view((3, 2, 4, 16)), HND, TransferPage(PageFormat.HND, BF16, 1, 2, 16, 4, blocks(3, 256))),
    "[NB,H,BS,W] with its slots outermost in memory": (
        view((3, 2, 4, 16), (160, 16, 32, 1)),
        NHD,
        TransferPage(PageFormat.NHD, BF16, 1, 2, 16, 4, blocks(3, 256, 320)),
    ),
    "[NB,BS,H,W] padded, heads outermost in memory": (
        view((3, 4, 2, 16), (160, 16, 64, 1)),
        HND,
        TransferPage(PageFormat.HND, BF16, 1, 2, 16, 4, blocks(3, 256, 320)),
    ),
    "one slot and one block": (view((1, 1, 2, 16)), NHD, TransferPage(PageFormat.NHD, BF16, 1, 2, 16, 1, blocks(1, 64))),
    "a dim of one whose stride is its block's": (
        view((3, 1, 4, 16), (64, 64, 16, 1)),
        NHD,
        TransferPage(PageFormat.NHD, BF16, 1, 4, 16, 1, blocks(3, 128)),
    ),
    "a dim of one whose stride is half a slot": (
        view((3, 1, 4, 16), (64, 8, 16, 1)),
        NHD,
        TransferPage(PageFormat.NHD, BF16, 1, 2, 8, 4, blocks(3, 128)),
    ),
    "[2,NB,BS,H,W]": (view((2, 3, 4, 2, 8)), NHD, TransferPage(PageFormat.KV_FIRST_NHD, BF16, 2, 2, 8, 4, planes(3, 128, 128, 384))),
    "[2,NB,H,BS,W]": (view((2, 3, 2, 4, 8)), HND, TransferPage(PageFormat.KV_FIRST_HND, BF16, 2, 2, 8, 4, planes(3, 128, 128, 384))),
    "[NB,2,BS,H,W]": (view((3, 2, 4, 2, 8)), NHD, TransferPage(PageFormat.BLOCK_FIRST_NHD, BF16, 2, 2, 8, 4, blocks(3, 256))),
    "[NB,2,H,BS,W]": (view((3, 2, 2, 4, 8)), HND, TransferPage(PageFormat.BLOCK_FIRST_HND, BF16, 2, 2, 8, 4, blocks(3, 256))),
    "[2,NB,…] with its blocks outermost in memory": (
        view((2, 3, 4, 2, 8), (64, 128, 16, 8, 1)),
        NHD,
        TransferPage(PageFormat.BLOCK_FIRST_NHD, BF16, 2, 2, 8, 4, blocks(3, 256)),
    ),
    "two blocks of K and V: blocks are taken for planes": (
        view((2, 2, 4, 2, 8)),
        NHD,
        TransferPage(PageFormat.KV_FIRST_NHD, BF16, 2, 2, 8, 4, planes(2, 128, 128, 256)),
    ),
    "no blocks": (view((0, 4, 16)), NHD, TransferPage(PageFormat.MLA, BF16, 1, 1, 16, 4, blocks(0, 128))),
}


@pytest.mark.parametrize("what", READ)
def test_a_view_is_read_as_the_transfer_reads_it(what: str) -> None:
    """Each format by rank, layout and the order in memory, to the byte of the first block."""
    raw, layout, page = READ[what]
    assert read_page(raw, layout) == page


UNREAD: dict[str, torch.Tensor] = {
    "a row of elements": view((64,)),
    "blocks of elements": view((3, 64)),
    "rank 6": view((2, 3, 2, 4, 2, 8)),
    "rank 5 without K and V": view((3, 4, 4, 2, 8)),
    "rank 5 with K and V further in": view((3, 4, 2, 2, 8)),
    "rank 5, padded": view((3, 2, 4, 2, 8), (160, 64, 16, 8, 1)),
    "K and V planes with room between them": view((2, 3, 4, 2, 8), (256, 64, 16, 8, 1)),
    "room between slots": view((3, 4, 16), (128, 32, 1)),
    "room between elements": view((3, 4, 16), (128, 32, 2)),
    "slots that overlap": view((3, 4, 16), (128, 8, 1)),
    "blocks that overlap": view((3, 4, 16), (32, 16, 1)),
    "blocks on top of each other": view((3, 4, 16), (0, 16, 1)),
    "a dim of one without a stride": view((3, 4, 1, 16), (64, 16, 0, 1)),
    "a dim of one whose stride divides nothing": view((3, 1, 4, 16), (64, 7, 16, 1)),
}


@pytest.mark.parametrize("what", UNREAD)
@pytest.mark.parametrize("layout", [NHD, HND])
def test_a_view_that_the_transfer_has_no_format_for_is_not_read(what: str, layout: Layout) -> None:
    """What cannot be read is known as such before the transfer is asked to read it."""
    assert read_page(UNREAD[what], layout) is None
