"""Where the bytes of a block lie: arithmetic on shapes and strides, never on a tensor's contents.

Nothing here touches a device, so all of it works on `meta` tensors.
"""

from math import prod

import torch

from stages.errors import Reason, reject
from stages.model import BlockRuns, CacheTensor, Kind, LayerCache, LeafSpec, Run

MAX_RUNS = 4096
"""A block of more separate runs than this is refused without listing them: no transfer copies it anyway."""


def block_runs(cache: LayerCache, spec: LeafSpec, num_blocks: int) -> tuple[int, int, BlockRuns]:
    """The block dim of a layer's raw tensors, its kernel pages per block, and the bytes each block owns.

    A block owns rows `b*r .. b*r+r-1` along the block dim of each tensor, `r = P / NB`. For a list of states the block
    owns its row of each. Raises RuleRejected: BLOCK_DIM_AMBIGUOUS, PAGES_PER_BLOCK, STATES_APART, STATE_STRIDES,
    SCATTERED_BLOCK.
    """
    dims = [block_dim(part.tensor, spec, num_blocks) for part in cache.tensors]
    ratios = [_pages_per_block(part.tensor, dim, spec, num_blocks) for part, dim in zip(cache.tensors, dims, strict=True)]
    if len({part.storage for part in cache.tensors}) > 1 or len(set(ratios)) > 1:
        raise reject(Reason.STATES_APART, storages=tuple(part.storage for part in cache.tensors), pages_per_block=tuple(ratios))
    steps = [
        ratio * part.tensor.stride(dim) * part.tensor.element_size() for part, dim, ratio in zip(cache.tensors, dims, ratios, strict=True)
    ]
    if num_blocks > 1 and len(set(steps)) > 1:
        raise reject(Reason.STATE_STRIDES, page_stride_bytes=tuple(steps))
    runs = merged([run for part, dim, ratio in zip(cache.tensors, dims, ratios, strict=True) for run in _rows(part, dim, ratio)])
    return dims[0], ratios[0], BlockRuns(runs, steps[0], num_blocks)


def block_dim(tensor: torch.Tensor, spec: LeafSpec, num_blocks: int) -> int:
    """Which dim counts blocks: the first, but the second of rank-5 attention that keeps K and V outermost.

    `[2, P, s, H, D]` (K and V first) and `[P, 2, s, H, D]` with two blocks look alike: of the two dims of size 2, the
    one with the larger stride counts blocks unless memory is K/V-first, and with dims in memory order nothing says. Of any
    other count the first dim of size 2 is K and V; rows that are no multiple of the blocks are refused, not counted elsewhere.
    """
    shape = tensor.shape
    if len(shape) != 5 or shape[0] != 2 or spec.kind is Kind.MAMBA:
        return 0
    if num_blocks != 2 or shape[1] != 2:
        return 1
    if tensor.stride(0) < tensor.stride(1):
        return 1
    raise reject(Reason.BLOCK_DIM_AMBIGUOUS, shape=tuple(shape), stride=tensor.stride(), num_blocks=num_blocks)


def strided_runs(shape: tuple[int, ...], stride: tuple[int, ...], offset: int, itemsize: int) -> tuple[Run, ...]:
    """The byte runs a strided view touches, merged and sorted; offset and strides in elements of `itemsize` bytes."""
    if 0 in shape:
        return ()
    outer = sorted((step * itemsize, size) for size, step in zip(shape, stride, strict=True) if size > 1)
    run_bytes = itemsize
    while outer and outer[0][0] == run_bytes:
        run_bytes *= outer.pop(0)[1]
    count = prod(size for _, size in outer)
    if count > MAX_RUNS:
        raise reject(Reason.SCATTERED_BLOCK, runs=count)
    starts = [offset * itemsize]
    for step, size in outer:
        starts = [start + index * step for start in starts for index in range(size)]
    return merged([Run(start, start + run_bytes) for start in starts])


def merged(runs: list[Run]) -> tuple[Run, ...]:
    """The same bytes as sorted runs that neither touch nor overlap."""
    out: list[Run] = []
    for run in sorted(runs, key=lambda run: run.start):
        if out and run.start <= out[-1].stop:
            out[-1] = Run(out[-1].start, max(out[-1].stop, run.stop))
        else:
            out.append(run)
    return tuple(out)


def byte_view(tensor: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], start: int) -> torch.Tensor:
    """An int8 view of a tensor's storage, `start` and strides in bytes; raises where it would leave the storage."""
    nothing = tensor.as_strided((0,), (1,))  # no elements of any dtype re-view as bytes; a permuted page may not
    return nothing.view(torch.int8).as_strided(shape, stride, start)


def _pages_per_block(tensor: torch.Tensor, dim: int, spec: LeafSpec, num_blocks: int) -> int:
    pages = tensor.shape[dim]
    ratio, rest = divmod(pages, num_blocks) if num_blocks else (1, pages)
    if rest or ratio == 0 or (spec.recurrent and ratio != 1):
        raise reject(Reason.PAGES_PER_BLOCK, rows=pages, num_blocks=num_blocks)
    return ratio


def _rows(part: CacheTensor, dim: int, count: int) -> tuple[Run, ...]:
    """The runs of the first `count` rows along `dim`."""
    shape = list(part.tensor.shape)
    shape[dim] = min(count, shape[dim])
    return strided_runs(tuple(shape), part.tensor.stride(), int(part.tensor.storage_offset()), part.tensor.element_size())
