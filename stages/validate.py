"""validate: what the engine offers, against what can be transferred at all.

Checks collect every refusal and raise once, so that an operator sees all bad layers. Tensors are looked at by shape and
stride only.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import lcm

from stages.errors import Fact, Reason, RegistrationRejected, Rejection, RuleRejected, Stage, reject
from stages.geometry import block_runs
from stages.model import (
    BlockRuns,
    CacheTensor,
    ExcludedLayer,
    Exclusion,
    Geometry,
    Kind,
    Layer,
    LayerCache,
    Layout,
    LeafSpec,
    Offer,
    OfferedGroup,
    Validated,
)

REUSABLE_MAMBA_MODES = frozenset({"align", "all"})
"""Modes that keep a state at block boundaries; the engine's "none" keeps only the running one."""

SERVED_LAYOUTS = tuple(layout for layout in Layout if not layout.scattered)

AUX_POOL_PREFIX = "cb.aux_pool."
"""Layer names that LMCache reserves for a connector's own page pools: `cb.aux_pool.<tokens per block>[.<label>]`."""

_REFUSED_KINDS = {
    Kind.CROSS_ATTENTION: Reason.CROSS_ATTENTION,
    Kind.ENCODER_ONLY_ATTENTION: Reason.ENCODER_ONLY_ATTENTION,
    Kind.UNKNOWN: Reason.UNKNOWN_KIND,
}


def validate(offer: Offer) -> Validated:
    """The layers to transfer and those left out, or RegistrationRejected with every refusal."""
    refusals = Refusals()
    groups = offer.groups + tuple(_aux_groups(offer, refusals))
    check_groups(replace(offer, groups=groups), refusals)
    if not offer.caches:
        refusals.raise_if_any()  # as at the connector's start, where there are no caches yet to miss
    group_of = _groups_of_layers(groups, refusals)
    layout = _layout(offer, refusals)
    exclusions = [_exclusion(group) for group in groups]
    excluded = [ExcludedLayer(name, group, why) for name, group in group_of.items() if (why := exclusions[group])]
    excluded += _shared(offer, group_of, refusals)
    left_out = {layer.name for layer in excluded}
    for name, group in group_of.items():
        if name not in offer.caches and name not in left_out:
            refusals.add(Reason.LAYER_WITHOUT_CACHE, group, (name,))
    layers = list(_layers(offer, groups, {name: group for name, group in group_of.items() if name not in left_out}, refusals))
    _check_storages(layers, refusals)
    refusals.raise_if_any()
    order = {name: index for index, name in enumerate(offer.caches)}
    return Validated(offer, layout, tuple(layers), tuple(sorted(excluded, key=lambda layer: order.get(layer.name, len(order)))))


def check_groups(offer: Offer, refusals: "Refusals") -> None:
    """What the groups' specs alone can say, before any tensor exists: kinds, Mamba modes, residency, chunk size."""
    for index, group in enumerate(offer.groups):
        if _exclusion(group):
            continue
        if group.host_resident:
            refusals.add(Reason.HOST_RESIDENT, index, group.layer_names)
        refused = {id(spec): verdict for spec in (None, *group.leaf_specs) if (verdict := _verdict(spec))}
        for name, spec in zip(group.layer_names, map(id, map(group.specs.get, group.layer_names)), strict=True):
            if spec in refused:
                refusals.add(refused[spec].reason, index, (name,), **refused[spec].facts)
    _check_chunk(offer, refusals)


def _verdict(spec: LeafSpec | None) -> RuleRejected | None:
    """Why no layer of this spec can be transferred."""
    if spec is None:
        return reject(Reason.LAYER_WITHOUT_SPEC)
    if spec.kind in _REFUSED_KINDS:
        return reject(_REFUSED_KINDS[spec.kind])
    if spec.recurrent and spec.mamba_cache_mode not in REUSABLE_MAMBA_MODES:
        return reject(Reason.MAMBA_CACHE_MODE, mode=spec.mamba_cache_mode)
    return None


@dataclass(slots=True)
class Refusals:
    """Refusals as they are found; those that differ only in the layer become one."""

    found: dict[tuple[Reason, int | None, tuple[tuple[str, Fact], ...]], list[str]] = field(default_factory=dict)

    def add(self, reason: Reason, group: int | None, layer_names: Iterable[str], **facts: Fact) -> None:
        """Note one refusal."""
        self.found.setdefault((reason, group, tuple(facts.items())), []).extend(layer_names)

    def raise_if_any(self) -> None:
        """Raise RegistrationRejected with all that were found."""
        if self.found:
            raise RegistrationRejected(
                tuple(
                    Rejection(Stage.VALIDATE, reason, None, group, tuple(dict.fromkeys(names)), dict(facts))
                    for (reason, group, facts), names in self.found.items()
                )
            )


def _exclusion(group: OfferedGroup) -> Exclusion | None:
    """Why no layer of a group is transferred. Scratch is the engine's own rule: *every* leaf keeps no reusable prefix."""
    if not group.transferable:
        return Exclusion.NOT_TRANSFERABLE
    specs = group.leaf_specs
    return Exclusion.SCRATCH if specs and not any(spec.prefix_cacheable for spec in specs) else None


def _check_chunk(offer: Offer, refusals: Refusals) -> None:
    """Every transferred group's tokens per block must divide LMCache's chunk, or a chunk would end inside a block."""
    chunk = offer.chunk_size_tokens
    if chunk is None:
        return
    tokens = {
        index: lcm(*(spec.tokens_per_block(offer.dcp_size) for spec in group.leaf_specs))
        for index, group in enumerate(offer.groups)
        if group.leaf_specs and not _exclusion(group)
    }
    for index, tokens_per_block in tokens.items():
        if chunk % tokens_per_block:
            refusals.add(
                Reason.CHUNK_SIZE,
                index,
                offer.groups[index].layer_names,
                chunk_size_tokens=chunk,
                tokens_per_block=tokens_per_block,
                smallest_valid_chunk_tokens=lcm(*tokens.values()),
            )


def _groups_of_layers(groups: tuple[OfferedGroup, ...], refusals: Refusals) -> dict[str, int]:
    group_of: dict[str, int] = {}
    for index, group in enumerate(groups):
        for name in group.layer_names:
            if name in group_of:
                refusals.add(Reason.LAYER_IN_TWO_GROUPS, index, (name,), other_group=group_of[name])
            group_of.setdefault(name, index)
    return group_of


def _layout(offer: Offer, refusals: Refusals) -> Layout:
    """The engine's layout by name; where it named none, by the strides of a layer that has both heads and slots."""
    name = offer.layout
    if name is None:
        return _layout_of_strides(offer)
    if name not in Layout.__members__:
        refusals.add(Reason.UNKNOWN_LAYOUT, None, (), layout=name, known=tuple(Layout))
        return Layout.NHD
    layout = Layout[name]
    if layout.scattered:
        refusals.add(Reason.SCATTERED_LAYOUT, None, offer.caches, layout=name, served=SERVED_LAYOUTS)
    return layout


def _layout_of_strides(offer: Offer) -> Layout:
    """NHD or HND by the first layer that tells. Where none does, or layers differ, the choice only names dims: a page
    that the transfer would misread under it is re-viewed, and every page is proven."""
    for group in offer.groups:
        for name, spec in group.specs.items():
            for part in offer.caches[name].tensors if name in offer.caches else ():
                heads_first = _heads_first(part, spec)
                if heads_first is not None:
                    return Layout.HND if heads_first else Layout.NHD
    return Layout.NHD


def _heads_first(part: CacheTensor, spec: LeafSpec) -> bool | None:
    """Whether heads have the larger stride than slots: `[…, s, H, D]` of rank 5, `[P, H, s, C]` of rank 4."""
    tensor = part.tensor
    if spec.recurrent or tensor.ndim not in (4, 5):
        return None
    slots, heads = (2, 3) if tensor.ndim == 5 else (2, 1)
    if min(tensor.shape[slots], tensor.shape[heads]) < 2 or spec.num_states % tensor.shape[slots]:
        return None
    return tensor.stride(heads) > tensor.stride(slots)


def _shared(offer: Offer, group_of: dict[str, int], refusals: Refusals) -> Iterator[ExcludedLayer]:
    """Caches in no group: each must be an alias of a grouped layer's, whose transfer then moves its bytes too."""
    # A pool that is in no group has been refused for its name.
    sharing = {name: cache for name, cache in offer.caches.items() if name not in group_of and not name.startswith(AUX_POOL_PREFIX)}
    owners = {_place(cache) for name, cache in offer.caches.items() if name in group_of} if sharing else ()
    for name, cache in sharing.items():
        if _place(cache) not in owners:
            refusals.add(Reason.CACHE_WITHOUT_GROUP, None, (name,))
        yield ExcludedLayer(name, None, Exclusion.SHARED)


def _place(cache: LayerCache) -> tuple[tuple[object, ...], ...]:
    """Which bytes a cache is: storage, first byte, bytes held and last byte of each tensor."""
    return tuple(
        (
            part.storage,
            part.tensor.storage_offset() * part.tensor.element_size(),
            part.tensor.numel() * part.tensor.element_size(),
            sum((size - 1) * step for size, step in zip(part.tensor.shape, part.tensor.stride(), strict=True)) * part.tensor.element_size(),
        )
        for part in cache.tensors
    )


def _layers(offer: Offer, groups: tuple[OfferedGroup, ...], group_of: Mapping[str, int], refusals: Refusals) -> Iterator[Layer]:
    """The layers with the bytes their blocks own; none where a spec is missing (already refused) or a tensor is wrong.

    Tensors are looked into once for all layers that differ only in where they begin: no check here depends on that.
    """
    seen: dict[object, Geometry] = {}
    for name, cache in offer.caches.items():
        group = group_of.get(name)
        spec = None if group is None else groups[group].specs.get(name)
        if group is None or spec is None:
            continue
        begin, structure = _structure(cache)
        num_blocks = groups[group].num_blocks
        alike = (id(spec), num_blocks, structure)
        geometry = seen.get(alike)
        if geometry is None:
            try:
                geometry = seen[alike] = _geometry(cache, begin, spec, num_blocks, spec.tokens_per_block(offer.dcp_size))
            except RuleRejected as refusal:
                refusals.add(refusal.reason, group, (name,), **refusal.facts)
                continue
        yield Layer(name, cache, group, geometry, begin)


def _structure(cache: LayerCache) -> tuple[int, object]:
    """The first byte of a cache, and all of its tensors but that."""
    first = cache.tensors[0]
    tensor = first.tensor
    begin = int(tensor.storage_offset()) * tensor.element_size()
    if not cache.listed:
        return begin, (tensor.dtype, tensor.shape, tensor.stride())
    parts = [(part.tensor, part.storage == first.storage) for part in cache.tensors]
    return begin, tuple(
        (part.dtype, part.shape, part.stride(), part.storage_offset() * part.element_size() - begin, together) for part, together in parts
    )


def _geometry(cache: LayerCache, begin: int, spec: LeafSpec, num_blocks: int, tokens_per_block: int) -> Geometry:
    """What a layer's tensors say about its blocks. Raises RuleRejected."""
    dim, ratio, owned = block_runs(cache, spec, num_blocks)
    _check_page(owned, spec)
    owned = owned.moved(-begin)
    last_page = owned.start + max(num_blocks - 1, 0) * owned.stride_bytes + spec.page_size_bytes
    return Geometry(spec, dim, ratio, owned, max(last_page, owned.extent.stop), tokens_per_block)


def _check_page(owned: BlockRuns, spec: LeafSpec) -> None:
    """A block's registered bytes against the spec's page."""
    if owned.num_blocks == 0:
        return
    if owned.size_bytes < (spec.unpadded_page_size_bytes or 1):
        raise reject(Reason.PAGE_TOO_SMALL, block_bytes=owned.size_bytes, unpadded_page_size_bytes=spec.unpadded_page_size_bytes)
    if owned.size_bytes > spec.page_size_bytes:
        raise reject(Reason.PAGE_TOO_LARGE, block_bytes=owned.size_bytes, page_size_bytes=spec.page_size_bytes)


def _check_storages(layers: list[Layer], refusals: Refusals) -> None:
    """Each storage against the last block cut from it. One that is too small was not made for these views, so every
    layer cut from it is refused: which of them would survive says nothing about the bytes they share."""
    owning = [layer for layer in layers if layer.geometry.owned.runs]
    if all(layer.begin_bytes + layer.geometry.owned.extent.stop <= layer.cache.tensors[0].storage_size_bytes for layer in owning):
        return
    end: dict[str, int] = {}
    for layer in owning:
        storage = layer.cache.tensors[0].storage
        end[storage] = max(end.get(storage, 0), layer.owned.extent.stop)
    for layer in layers:
        last = end.get(layer.cache.tensors[0].storage, 0)
        if last > layer.storage_size_bytes:
            refusals.add(Reason.PAST_STORAGE, layer.group, (layer.name,), end_bytes=last, storage_bytes=layer.storage_size_bytes)


def _aux_groups(offer: Offer, refusals: Refusals) -> Iterator[OfferedGroup]:
    """Auxiliary page pools as groups after the engine's own, one per tokens-per-block, as LMCache numbers them."""
    pools: dict[int, list[str]] = {}
    for name in offer.caches:
        if not name.startswith(AUX_POOL_PREFIX):
            continue
        tokens = name.removeprefix(AUX_POOL_PREFIX).split(".", 1)[0]
        if not tokens.isdecimal() or int(tokens) == 0 or [part.tensor.ndim for part in offer.caches[name].tensors] != [3]:
            refusals.add(Reason.AUX_POOL_NAME, None, (name,))
            continue
        pools.setdefault(int(tokens), []).append(name)
    for tokens_per_block, names in pools.items():
        tensors = {name: offer.caches[name].tensors[0].tensor for name in names}
        specs = {name: _aux_spec(tensors[name].shape, tensors[name].element_size(), tokens_per_block) for name in names}
        yield OfferedGroup(tuple(names), tensors[names[0]].shape[0], specs)


def _aux_spec(shape: tuple[int, ...], itemsize: int, tokens_per_block: int) -> LeafSpec:
    """`[NB, slots, C]`: replicated on every rank, so its tokens per block are never scaled."""
    return LeafSpec(Kind.MLA_ATTENTION, tokens_per_block, shape[1] * shape[2] * itemsize, shape[1], dcp_sharded=False)
