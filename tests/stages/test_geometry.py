"""Geometry: the bytes of a block by arithmetic are the bytes of a block by indexing."""

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.errors import Reason, RegistrationRejected, RuleRejected
from stages.geometry import MAX_RUNS, block_dim, block_runs, strided_runs
from stages.model import CacheTensor, Kind, LayerCache, LeafSpec, Run
from stages.validate import validate
from tests.stages.judge import owned
from tests.stages.worlds import World, arbitrary, served


def cells(runs: tuple[Run, ...]) -> list[int]:
    """The bytes of runs, in their order."""
    return [byte for run in runs for byte in range(run.start, run.stop)]


@settings(max_examples=60)
@given(st.one_of(served(), arbitrary()))
def test_a_block_owns_the_bytes_that_its_rows_index(world: World) -> None:
    """Of every layer that validate lets through, each block's bytes are those that indexing the raw tensors finds."""
    try:
        layers = validate(world.offer()).layers
    except RegistrationRejected:
        return
    laid = {laid.name: laid for laid in world.layers}
    for layer in layers:
        for block in range(layer.owned.num_blocks):
            expected = [byte + block * layer.owned.stride_bytes for byte in cells(layer.owned.runs)]
            assert owned(world, laid[layer.name], block).tolist() == expected


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), min_size=1, max_size=4),
    st.integers(0, 9),
    st.sampled_from((1, 2, 4)),
)
def test_the_runs_of_a_strided_view_are_its_bytes(dims: list[tuple[int, int]], offset: int, item: int) -> None:
    """Whatever the shape and strides, zero and overlapping ones too, runs are the bytes of the view: sorted, apart, each once."""
    shape, stride = zip(*dims, strict=True)
    index = torch.arange(1000).as_strided((*shape, item), (*(step * item for step in stride), 1), offset * item)
    runs = strided_runs(shape, stride, offset, item)
    assert cells(runs) == sorted(set(index.flatten().tolist()))
    assert all(one.stop < other.start for one, other in pairwise(runs))


def test_a_block_of_too_many_pieces_is_refused_before_they_are_listed() -> None:
    """A page scattered over a million runs is refused in no time: no transfer copies it."""
    with pytest.raises(RuleRejected) as caught:
        strided_runs((1 << 20, 2), (4, 2), 0, 1)
    assert caught.value.reason is Reason.SCATTERED_BLOCK
    assert caught.value.facts == {"runs": 2 << 20}
    assert len(strided_runs((MAX_RUNS,), (2,), 0, 1)) == MAX_RUNS


def test_a_cache_of_an_engine_in_production_is_no_work() -> None:
    """A million blocks of a few hundred kernel pages cost as much as one."""
    blocks, pages, page = 1 << 20, 256, 1 << 14
    assert strided_runs((blocks * pages, 2, 64, 128), (page, page // 2, 128, 1), 0, 2) == (Run(0, blocks * pages * prod((2, 64, 128)) * 2),)


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_planes_of_keys_and_values_that_are_short_of_rows_are_no_blocks(rows: int) -> None:
    """Two blocks in K and V planes of an odd number of rows: refused, not taken for two blocks of one plane each."""
    tensor = torch.empty(2, rows, 4, 2, 8)
    spec = LeafSpec(Kind.FULL_ATTENTION, 4, 1 << 20, 4)
    assert block_dim(tensor, spec, 2) == 1
    with pytest.raises(RuleRejected) as caught:
        block_runs(LayerCache((CacheTensor(tensor, "0", tensor.nbytes),)), spec, 2)
    assert (caught.value.reason, caught.value.facts) == (Reason.PAGES_PER_BLOCK, {"rows": rows, "num_blocks": 2})
