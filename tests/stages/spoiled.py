"""Workers that an engine should not have allocated: a served one with one thing wrong. They must be refused, or still be right.

What a block owns stays what the spoilt tensors' indices say; where the number of blocks changes, rows are shared out anew.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from hypothesis import strategies as st

from stages.model import Kind, LeafSpec, OfferedGroup
from tests.stages.worlds import Cut, Laid, World, served

Spoiler = Callable[[st.DrawFn, World], World]


@st.composite
def spoiled(draw: st.DrawFn) -> World:
    """A served worker with one thing wrong."""
    world = draw(served())
    return SPOILERS[draw(st.sampled_from(sorted(SPOILERS)))](draw, world)


# ------------------------------------------------------------------------------------------------------------- the tensors


def _any_cut(draw: st.DrawFn, world: World, change: Callable[[Cut], Cut]) -> World:
    """One tensor of one layer changed."""
    laid = _any_layer(draw, world)
    index = draw(st.integers(0, len(laid.cuts) - 1))
    cuts = (*laid.cuts[:index], change(laid.cuts[index]), *laid.cuts[index + 1 :])
    return _with_layer(world, replace(laid, cuts=cuts))


def _any_layer(draw: st.DrawFn, world: World) -> Laid:
    """A layer of the engine's groups or beside them; an auxiliary pool has no spec but its tensor's own shape."""
    return draw(st.sampled_from([laid for laid in world.layers if laid.name not in world.pools]))


def _with_layer(world: World, changed: Laid) -> World:
    """The world with one layer changed, and its spec with it."""
    layers = tuple(changed if laid.name == changed.name else laid for laid in world.layers)
    groups = tuple(
        replace(group, specs={**group.specs, changed.name: changed.spec}) if changed.name in group.specs else group
        for group in world.groups
    )
    return replace(world, layers=layers, groups=groups)


def _one(draw: st.DrawFn, numbers: tuple[int, ...], by: tuple[int, ...]) -> tuple[int, ...]:
    """One of some numbers changed, none below 0."""
    index = draw(st.integers(0, len(numbers) - 1))
    return (*numbers[:index], max(numbers[index] + draw(st.sampled_from(by)), 0), *numbers[index + 1 :])


def _offset(draw: st.DrawFn, world: World) -> World:
    return _any_cut(draw, world, lambda cut: replace(cut, offset=max(cut.offset + draw(st.sampled_from((1, 2, -1, 8, 64, 10_000))), 0)))


def _stride(draw: st.DrawFn, world: World) -> World:
    return _any_cut(draw, world, lambda cut: replace(cut, stride=_one(draw, cut.stride, (1, -1, 2, 4, 16, -10_000))))


def _shape(draw: st.DrawFn, world: World) -> World:
    return _any_cut(draw, world, lambda cut: replace(cut, shape=_one(draw, cut.shape, (1, -1, 2))))


def _dims_swapped(draw: st.DrawFn, world: World) -> World:
    def swapped(cut: Cut) -> Cut:
        one, other = draw(st.sampled_from([(i, j) for i in range(len(cut.shape)) for j in range(i)]))
        shape, stride = list(cut.shape), list(cut.stride)
        shape[one], shape[other], stride[one], stride[other] = shape[other], shape[one], stride[other], stride[one]
        return replace(cut, shape=tuple(shape), stride=tuple(stride))

    changed = _any_cut(draw, world, swapped)
    return changed if _rows_are_blocks(changed) else replace(world, layout="LHBNC")


def _rows_are_blocks(world: World) -> bool:
    """Whether each layer's block dim still has its rows, so that what a block owns can be read off."""
    num_blocks = {name: group.num_blocks for group in world.groups for name in group.layer_names} | dict(world.pools)
    return all(
        len(cut.shape) > laid.block_dim and cut.shape[laid.block_dim] == num_blocks[laid.name] * laid.pages
        for laid in world.layers
        if laid.name in num_blocks
        for cut in laid.cuts
    )


def _dtype(draw: st.DrawFn, world: World) -> World:
    return _any_cut(draw, world, lambda cut: replace(cut, dtype=draw(st.sampled_from((torch.uint8, torch.bfloat16, torch.float32)))))


def _storage_short(draw: st.DrawFn, world: World) -> World:
    key = draw(st.sampled_from(sorted(world.storage_bytes)))
    short = max(world.storage_bytes[key] - draw(st.sampled_from((1, 2, 16, 1000))), 0)
    return replace(world, storage_bytes={**world.storage_bytes, key: short})


def _storage_apart(draw: st.DrawFn, world: World) -> World:
    """A tensor moved into a storage of its own, as long as the one it was cut from."""
    changed = _any_cut(draw, world, lambda cut: replace(cut, storage=f"{cut.storage}'"))
    return replace(changed, storage_bytes={**world.storage_bytes, **{f"{key}'": size for key, size in world.storage_bytes.items()}})


def _same_place(draw: st.DrawFn, world: World) -> World:
    """One layer laid on another."""
    laid, other = _any_layer(draw, world), draw(st.sampled_from(world.layers))
    cuts = tuple(replace(cut, storage=other.cuts[0].storage, offset=other.cuts[0].offset) for cut in laid.cuts)
    return _with_layer(world, replace(laid, cuts=cuts))


# --------------------------------------------------------------------------------------------------------------- the specs


def _any_spec(draw: st.DrawFn, world: World, change: Callable[[LeafSpec], LeafSpec]) -> World:
    laid = _any_layer(draw, world)
    return _with_layer(world, replace(laid, spec=change(laid.spec)))


def _kind(draw: st.DrawFn, world: World) -> World:
    return _any_spec(draw, world, lambda spec: replace(spec, kind=draw(st.sampled_from(sorted(Kind)))))


def _mode(draw: st.DrawFn, world: World) -> World:
    return _any_spec(draw, world, lambda spec: replace(spec, mamba_cache_mode=draw(st.sampled_from(("none", None, "new")))))


def _page_bytes(draw: st.DrawFn, world: World) -> World:
    by = draw(st.sampled_from((1, -1, 4, -4, 64, 1000)))
    return _any_spec(draw, world, lambda spec: replace(spec, page_size_bytes=max(spec.page_size_bytes + by, 1)))


def _unpadded_bytes(draw: st.DrawFn, world: World) -> World:
    return _any_spec(draw, world, lambda spec: replace(spec, unpadded_page_size_bytes=spec.page_size_bytes + 1))


def _states(draw: st.DrawFn, world: World) -> World:
    by = draw(st.sampled_from((1, -1, 2, 3)))
    return _any_spec(draw, world, lambda spec: replace(spec, num_states=max(spec.num_states + by, 1)))


def _block_size(draw: st.DrawFn, world: World) -> World:
    by = draw(st.sampled_from((1, -1, 2, 8)))
    return _any_spec(draw, world, lambda spec: replace(spec, block_size=max(spec.block_size + by, 1)))


# -------------------------------------------------------------------------------------------------------------- the groups


def _any_group(draw: st.DrawFn, world: World, change: Callable[[OfferedGroup], OfferedGroup]) -> World:
    index = draw(st.sampled_from([index for index, group in enumerate(world.groups) if group.layer_names]))
    return replace(world, groups=(*world.groups[:index], change(world.groups[index]), *world.groups[index + 1 :]))


def _num_blocks(draw: st.DrawFn, world: World) -> World:
    """Another number of blocks for the same rows: where they divide by it, each block owns that many of them."""
    number = draw(st.sampled_from((0, 1, 2, 3, 4, 6, 10)))
    changed = _any_group(draw, world, lambda group: replace(group, num_blocks=number))
    fewer = {name for group, old in zip(changed.groups, world.groups, strict=True) if group != old for name in group.layer_names}

    def rows(laid: Laid) -> int:
        return laid.cuts[0].shape[laid.block_dim] // number if number else 1

    return replace(
        changed, layers=tuple(replace(laid, pages=max(rows(laid), 1)) if laid.name in fewer else laid for laid in changed.layers)
    )


def _host_resident(draw: st.DrawFn, world: World) -> World:
    return _any_group(draw, world, lambda group: replace(group, host_resident=True))


def _in_two_groups(draw: st.DrawFn, world: World) -> World:
    return replace(world, groups=(*world.groups, draw(st.sampled_from([group for group in world.groups if group.layer_names]))))


def _no_spec(draw: st.DrawFn, world: World) -> World:
    return _any_group(draw, world, lambda group: replace(group, specs=dict(list(group.specs.items())[1:])))


def _no_cache(draw: st.DrawFn, world: World) -> World:
    missing = _any_layer(draw, world)
    return replace(world, layers=tuple(laid for laid in world.layers if laid is not missing))


def _no_group(draw: st.DrawFn, world: World) -> World:
    def without_first(group: OfferedGroup) -> OfferedGroup:
        names = group.layer_names[1:]
        return replace(group, layer_names=names, specs={name: group.specs[name] for name in names})

    return _any_group(draw, world, without_first)


def _bad_pool(draw: st.DrawFn, world: World) -> World:
    name = draw(st.sampled_from(("cb.aux_pool.", "cb.aux_pool.0", "cb.aux_pool.x.4", "cb.aux_pool.-1")))
    return replace(world, layers=(*world.layers, replace(world.layers[0], name=name)))


# -------------------------------------------------------------------------------------------------------------- the worker


def _layout(draw: st.DrawFn, world: World) -> World:
    return replace(world, layout=draw(st.sampled_from(("NHD", "HND", "LBNHC", "LBHNC", "BLNHC", "BLHNC", "LHBNC", "BHLNC", "NEW"))))


def _chunk(draw: st.DrawFn, world: World) -> World:
    return replace(world, chunk_size_tokens=draw(st.sampled_from((1, 4, 12, 96, 256))))


SPOILERS: dict[str, Spoiler] = {
    "a chunk that ends inside a block": _chunk,
    "a dtype of another width": _dtype,
    "a group twice": _in_two_groups,
    "a group with another number of blocks": _num_blocks,
    "a host-resident group": _host_resident,
    "a layer laid on another": _same_place,
    "a layer without a cache": _no_cache,
    "a layer without a group": _no_group,
    "a layer without a spec": _no_spec,
    "a layout that is not the memory's": _layout,
    "a Mamba mode": _mode,
    "a pool's name": _bad_pool,
    "a storage that ends too soon": _storage_short,
    "a tensor in another storage": _storage_apart,
    "another block size": _block_size,
    "another dim order": _dims_swapped,
    "another kind": _kind,
    "another number of states": _states,
    "another offset": _offset,
    "another page size": _page_bytes,
    "another shape": _shape,
    "another stride": _stride,
    "fewer bytes than the spec's": _unpadded_bytes,
}
