"""Geometry: the bytes of a block by arithmetic are the bytes of a block by indexing."""

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.errors import Fact, Reason, RegistrationRejected, RuleRejected
from stages.geometry import MAX_RUNS, block_dim, block_runs, strided_runs
from stages.model import BlockRuns, CacheTensor, Geometry, Kind, Layer, LayerCache, LeafSpec, Run
from stages.pages import room_bytes
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


def parts(*shapes_and_strides: tuple[tuple[int, ...], tuple[int, ...]]) -> LayerCache:
    """Tensors of bytes, all from the first byte of one storage."""
    memory = torch.empty(1 << 12, dtype=torch.uint8)
    tensors = (memory.as_strided(shape, stride) for shape, stride in shapes_and_strides)
    return LayerCache(tuple(CacheTensor(tensor, "0", memory.nbytes) for tensor in tensors), listed=True)


ATTENTION, STATE = LeafSpec(Kind.FULL_ATTENTION, 4, 64, 4), LeafSpec(Kind.MAMBA, 4, 64, 1)

NO_BLOCKS_OF_A_LAYER: dict[str, tuple[LayerCache, LeafSpec, int, Reason, dict[str, Fact]]] = {
    "parts of one and of two rows a block": (
        parts(((3, 16), (32, 1)), ((6, 8), (16, 1))),
        ATTENTION,
        3,
        Reason.STATES_APART,
        {"storages": ("0", "0"), "pages_per_block": (1, 2)},
    ),
    "states whose blocks are not one step apart": (
        parts(((2, 16), (64, 1)), ((2, 16), (48, 1))),
        STATE,
        2,
        Reason.STATE_STRIDES,
        {"page_stride_bytes": (64, 48)},
    ),
    "two rows of state a block": (parts(((6, 16), (64, 1))), STATE, 3, Reason.PAGES_PER_BLOCK, {"rows": 6, "num_blocks": 3}),
    "fewer rows than blocks": (parts(((0, 16), (64, 1))), ATTENTION, 3, Reason.PAGES_PER_BLOCK, {"rows": 0, "num_blocks": 3}),
    "two blocks, or K and V, as far apart": (
        parts(((2, 2, 4, 2, 8), (64, 64, 16, 8, 1))),
        ATTENTION,
        2,
        Reason.BLOCK_DIM_AMBIGUOUS,
        {"shape": (2, 2, 4, 2, 8), "stride": (64, 64, 16, 8, 1), "num_blocks": 2},
    ),
}


@pytest.mark.parametrize("what", NO_BLOCKS_OF_A_LAYER)
def test_tensors_that_are_no_blocks_of_one_layer_are_refused(what: str) -> None:
    """Rows that nothing divides into blocks, or that lie a block apart in one state and not in the other."""
    cache, spec, num_blocks, reason, facts = NO_BLOCKS_OF_A_LAYER[what]
    with pytest.raises(RuleRejected) as caught:
        block_runs(cache, spec, num_blocks)
    assert (caught.value.reason, caught.value.facts) == (reason, facts)


def test_one_block_has_no_step_to_differ_in() -> None:
    """The states of a single block are its block, whatever a second one's distance would be; of no blocks, none."""
    one = parts(((1, 16), (64, 1)), ((1, 24), (48, 1)))
    assert block_runs(one, STATE, 1) == (0, 1, BlockRuns((Run(0, 24),), 64, 1))
    none = parts(((0, 16), (64, 1)), ((0, 24), (64, 1)))
    assert block_runs(none, STATE, 0) == (0, 1, BlockRuns((), 64, 0))


@pytest.mark.parametrize(
    ("step", "page_bytes", "num_blocks", "storage_bytes", "room"),
    [
        (64, 48, 3, 192, 48),  # the page: what follows is another layer's
        (64, 96, 3, 192, 64),  # the step: a page said to be longer than it would reach into the next block
        (64, 64, 3, 192 - 12, 52),  # the storage: it ends with the last block's content
        (64, 64, 2, 128 - 12, 52),
        (16, 64, 1, 192, 64),  # a single block has no step
        (16, 64, 1, 40, 40),
        (64, 64, 0, 192, 64),
    ],
)
def test_a_view_may_cover_a_page_s_own_padding(step: int, page_bytes: int, num_blocks: int, storage_bytes: int, room: int) -> None:
    """As far as the page goes, but neither into the next block nor past the end of the storage."""
    memory = torch.empty(storage_bytes, dtype=torch.uint8)
    spec = LeafSpec(Kind.MLA_ATTENTION, 4, page_bytes, 4)
    cache = LayerCache((CacheTensor(memory.as_strided((num_blocks, 4, 10), (step, 10, 1)), "0", storage_bytes),))
    dim, ratio, owned = block_runs(cache, spec, num_blocks)
    assert room_bytes(Layer("l.0", cache, 0, Geometry(spec, dim, ratio, owned, 0, 4), 0)) == room
