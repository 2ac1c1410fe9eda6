"""An independent judge of plans: which bytes a transfer touches, against whose they are, one byte at a time.

What a block owns is read off the raw tensors by indexing them: an index of byte addresses is viewed with a raw tensor's
own shape and strides, and a block's rows are selected. What a transfer touches is simulated from the identity it was
given (format, planes, heads, width, slots, dtype), the group's one block stride, and the view's first byte. None of it
uses the stages' own arithmetic.
"""

from functools import lru_cache
from math import prod

import torch

from stages.model import EditedLayer, EngineGroup, Kind, PageFormat, Plan
from tests.stages.worlds import Cut, Laid, World

NOBODY = -1


@lru_cache(maxsize=64)
def addresses(cut: Cut) -> torch.Tensor:
    """Byte addresses in the raw tensor's own shape, with one more dim for the bytes of an element."""
    item = cut.dtype.itemsize
    shape, stride = (*cut.shape, item), (*(step * item for step in cut.stride), 1)
    reach = cut.offset * item + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1 if prod(shape) else 0
    return torch.arange(reach).as_strided(shape, stride, cut.offset * item)


def owned(world: World, laid: Laid, block: int) -> torch.Tensor:
    """The byte addresses of one block of a layer, by indexing its raw tensors; ascending, each once."""
    return _owned(laid.cuts, laid.block_dim, laid.pages, block)


@lru_cache(maxsize=1024)
def _owned(cuts: tuple[Cut, ...], block_dim: int, pages: int, block: int) -> torch.Tensor:
    rows = [addresses(cut).narrow(block_dim, block * pages, pages).flatten() for cut in cuts]
    ascending: torch.Tensor = torch.cat(rows).unique()
    return ascending


def touched(layer: EditedLayer, group: EngineGroup, block: int) -> list[range]:
    """The byte addresses a transfer kernel copies for one block: one run, or one in each of the K and V planes."""
    page = layer.page
    plane = page.slots * page.heads * page.width * page.dtype.itemsize
    first = layer.view.storage_offset() * layer.view.element_size()
    if page.format in (PageFormat.KV_FIRST_NHD, PageFormat.KV_FIRST_HND):
        return [range(start, start + plane) for start in (first + block * plane, first + (group.num_blocks + block) * plane)]
    start = first + block * group.block_stride_bytes
    return [range(start, start + page.planes * plane)]


def judge(world: World, plan: Plan) -> None:
    """Assert that every byte of every block of every layer is right, and slots, grouping and exclusions are."""
    expected = transferred(world)
    whose: dict[tuple[int, str], torch.Tensor] = {}
    assert sorted(layer.layer.name for layer in plan.layers) == sorted(expected)
    assert sorted(name for group in plan.groups for name in group.layer_names) == sorted(expected)
    everybody = {laid.name for laid in world.layers} | {name for group in world.groups for name in group.layer_names}
    assert {layer.name for layer in plan.excluded} == everybody - set(expected)
    assert [group.layer_indices[0] for group in plan.groups] == sorted(group.layer_indices[0] for group in plan.groups)
    assert len({(group.engine_group_id, plan.layers[group.layer_indices[0]].page.identity) for group in plan.groups}) == len(plan.groups)
    for group in plan.groups:
        assert group.layer_names == tuple(plan.layers[index].layer.name for index in group.layer_indices)
        assert len({plan.layers[index].page.identity for index in group.layer_indices}) == 1
        for index in group.layer_indices:
            layer = plan.layers[index]
            laid = next(laid for laid in world.layers if laid.name == layer.layer.name)
            assert (group.engine_group_id, group.num_blocks) == expected[laid.name]
            place = (group.engine_group_id, laid.cuts[0].storage)
            if place not in whose:
                whose[place] = owners(world, *place, expected)
            _judge_layer(world, laid, layer, group, whose[place])


def _judge_layer(world: World, laid: Laid, layer: EditedLayer, group: EngineGroup, whose: torch.Tensor) -> None:
    spec, num_blocks = laid.spec, group.num_blocks
    assert layer.view.shape[layer.block_dim] == num_blocks
    assert layer.view.untyped_storage()._cdata == layer.layer.raw.untyped_storage()._cdata
    mamba = spec.kind is Kind.MAMBA
    assert group.recurrent_state == mamba
    assert group.tokens_per_block == spec.block_size * (1 if mamba or spec.dcp_sharded is False else world.dcp_size)
    windowed = spec.kind in (Kind.SLIDING_WINDOW, Kind.SLIDING_WINDOW_MLA) and spec.sliding_window_tokens is not None
    assert group.sw_size_tokens == (spec.block_size if mamba else spec.sliding_window_tokens if windowed else -1)
    assert group.slots_per_block == layer.page.slots
    assert spec.block_size % group.slots_per_block == 0 if mamba else group.slots_per_block == min(spec.num_states, spec.block_size)
    for block in range(num_blocks):
        own = owned(world, laid, block)
        runs = touched(layer, group, block)
        where = f"{laid.name} block {block} of {num_blocks}"
        assert max(run.stop for run in runs) <= len(whose), f"{where}: past the storage"
        moved = torch.cat([torch.arange(run.start, run.stop) for run in runs])
        assert len(moved) == len(moved.unique()) == group.block_bytes, where
        mine = whose[moved] == whose[own[0]]
        assert int(mine.sum()) == len(own), f"{where}: {len(own) - int(mine.sum())} of {len(own)} bytes are not moved"
        spill = moved[~mine]
        assert bool((whose[spill] == NOBODY).all()), f"{where}: bytes of somebody else"
        assert bool(((spill > own[0]) & (spill < own[0] + spec.page_size_bytes)).all()), f"{where}: beyond its page"


def owners(world: World, group_id: int, storage: str, expected: dict[str, tuple[int, int]]) -> torch.Tensor:
    """Of each byte of a storage, which block of which layer of one group owns it. Two owners of a byte are an error."""
    whose = torch.full((world.storage_bytes[storage],), NOBODY)
    number = NOBODY
    for laid in world.layers:
        if laid.cuts[0].storage == storage and expected.get(laid.name, (None,))[0] == group_id:
            for block in range(expected[laid.name][1]):
                own = owned(world, laid, block)
                assert bool((whose[own] == NOBODY).all()), f"{laid.name} block {block}: its bytes are another's too"
                number += 1
                whose[own] = number
    return whose


def transferred(world: World) -> dict[str, tuple[int, int]]:
    """Group id and number of blocks of every layer that is to be transferred, aux pools in groups after the engine's."""
    out: dict[str, tuple[int, int]] = {}
    for index, group in enumerate(world.groups):
        if group.transferable and any(spec.prefix_cacheable for spec in group.specs.values()):
            out |= dict.fromkeys(group.layer_names, (index, group.num_blocks))
    pools: dict[str, int] = {}
    for laid in world.layers:
        if laid.name in world.pools:
            tokens = laid.name.split(".")[2]
            pools.setdefault(tokens, len(world.groups) + len(pools))
            out[laid.name] = (pools[tokens], world.pools[laid.name])
    return out
