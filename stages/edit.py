"""edit: each layer re-paged to block granularity by the first rule that matches, then proven, edited or not.

Views only: an edited layer shares its raw tensor's storage.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import torch

from stages.errors import Reason, RegistrationRejected, Rejection, RuleRejected, Stage, reject
from stages.model import AlikeLayers, Edited, EditedLayer, Layer, Layout, Paging, TransferPage, Validated
from stages.pages import opaque_page, read_page, two_plane_page
from stages.proof import overlapping, prove
from stages.rules import RULES
from stages.rules.rule import Edit, Rule

IDENTITY_SPLIT_VIEW = "identity-split-view"
"""The one edit that is not a rule, because no layer alone calls for it: see `_told_apart`."""

MOST_SYNTHETIC_HEADS = 1024
"""How many heads a page may be split over to be told apart; a page that needs more is refused."""

_LARGEST_ELEMENT_BYTES = 16
"""Of any dtype; begins that differ by a multiple of it are reached by a whole number of elements."""


def edit(validated: Validated, rules: tuple[Rule, ...] = RULES) -> Edited:
    """Every layer as the transfer will read it, or RegistrationRejected with every layer that cannot be proven."""
    layout = validated.layout
    edited: list[EditedLayer] = []
    rejections: list[Rejection] = []
    proven: dict[object, Paging] = {}
    together: dict[tuple[int, object], tuple[Paging, list[int]]] = {}
    taken: dict[object, object] = {}
    for layer in validated.layers:
        group, alike = layer.group, _alike(layer)
        known = together.get((group, alike))
        if known is None:
            rule = next((rule for rule in rules if rule.matches(layer, layout)), None)
            try:
                if alike not in proven:
                    proven[alike] = _edit(layer, rule, layout)
                known = together[group, alike] = (_told_apart(layer, proven[alike], layout, taken), [])
            except RuleRejected as refusal:
                rejections.append(_rejection(layer, rule.name if rule else None, refusal))
                continue
        paging, indices = known
        indices.append(len(edited))
        edited.append(EditedLayer(layer, _view(layer, paging), paging))
    rejections += [_rejection(other.layer, other.rule, refusal) for other, refusal in overlapping(edited)]
    if rejections:
        raise RegistrationRejected(tuple(_merged(rejections)))
    same = tuple(AlikeLayers(group, paging, tuple(indices)) for (group, _), (paging, indices) in together.items())
    return Edited(validated.offer, layout, tuple(edited), validated.excluded, same, _applied(edited, same))


def _alike(layer: Layer) -> object:
    """All that a rule may look at, and a proof does: layers of which this is equal are edited and proven once.

    They differ in where they begin, by a multiple of every element size. The proof compares bytes of one layer with each
    other, so it moves along; where the storage ends is looked at where that cuts short what a transfer may touch. The
    other layers are looked at by `overlapping`.
    """
    geometry, begin = layer.geometry, layer.begin_bytes
    left_bytes = layer.cache.tensors[0].storage_size_bytes - begin
    return geometry, left_bytes if left_bytes < geometry.reach_bytes else None, begin % _LARGEST_ELEMENT_BYTES


def _edit(layer: Layer, rule: Rule | None, layout: Layout) -> Paging:
    """A layer's proven view. Raises RuleRejected."""
    edit = rule.apply(layer, layout) if rule else Edit(layer.raw, layer.block_dim, opaque=False)
    return _proven(layer, edit, rule.name if rule else None, layout)


def _proven(layer: Layer, edit: Edit, rule: str | None, layout: Layout) -> Paging:
    view, num_blocks = edit.view, layer.geometry.owned.num_blocks
    if view.untyped_storage()._cdata != layer.raw.untyped_storage()._cdata:
        raise reject(Reason.NOT_A_VIEW, shape=tuple(view.shape))
    page = read_page(view, layout)
    if page is None or (len(layer.cache.tensors) > 1 and rule is None):
        raise reject(Reason.UNREADABLE_VIEW, kind=layer.spec.kind, shape=tuple(view.shape), stride=view.stride())
    prove(layer, page)
    if view.shape[edit.block_dim : edit.block_dim + 1] != (num_blocks,):
        raise reject(Reason.BLOCK_COUNT, shape=tuple(view.shape), block_dim=edit.block_dim, num_blocks=num_blocks)
    begin_bytes = int(view.storage_offset()) * view.element_size() - layer.begin_bytes
    page = page.moved(-layer.begin_bytes)
    return Paging(tuple(view.shape), view.stride(), begin_bytes, page, edit.block_dim, rule, edit.opaque)


def _view(layer: Layer, paging: Paging) -> torch.Tensor:
    """A layer's tensor under a view that was proven for it or one like it."""
    raw = layer.cache.tensors[0].tensor
    if paging.rule is None:
        return raw
    dtype = paging.page.dtype
    # No elements of any dtype re-view as another dtype; a permuted page may not.
    typed = raw if raw.dtype is dtype else raw.as_strided((0,), (1,), 0).view(dtype)
    return typed.as_strided(paging.shape, paging.stride, (layer.begin_bytes + paging.begin_bytes) // dtype.itemsize)


def _told_apart(layer: Layer, paging: Paging, layout: Layout, taken: dict[object, object]) -> Paging:
    """The view of a layer that looks like one `taken` before it but must be copied differently, made to look different.

    The transfer copies layers of one identity by the first one's stride, tokens and window, and takes layers whose views
    have one shape and dtype for one format, the first one's. A later layer that differs is viewed with its slot's bytes
    split over more synthetic heads: the same bytes under a shape and an identity of their own. Raises RuleRejected.
    """
    for told in _lookalikes(layer, paging, layout):
        assumed = _assumed(layer, told)
        if all(taken.get(key, value) == value for key, value in assumed.items()):
            taken.update(assumed)
            return told
    stride, tokens = paging.page.planned.stride_bytes, layer.tokens_per_block
    raise reject(Reason.TRANSFER_IDENTITY_SHARED, block_stride_bytes=stride, tokens_per_block=tokens)


def _assumed(layer: Layer, paging: Paging) -> dict[object, object]:
    """What the transfer takes for granted of every layer of a group: by identity, and by shape and dtype."""
    page, spec = paging.page, layer.spec
    return {
        (layer.group, page.identity): (page.planned.stride_bytes, layer.tokens_per_block, spec.window_tokens, spec.recurrent),
        (layer.group, paging.shape, page.dtype): page.format,
    }


def _lookalikes(layer: Layer, paging: Paging, layout: Layout) -> Iterator[Paging]:
    """A layer's view itself, then the same bytes under other identities, each proven."""
    yield paging
    for edit in _other_pages(layer, paging.page, layout):
        with suppress(RuleRejected):
            yield _proven(layer, edit, paging.rule or IDENTITY_SPLIT_VIEW, layout)


def _other_pages(layer: Layer, page: TransferPage, layout: Layout) -> Iterator[Edit]:
    """A page's bytes as one run a block, its slots split over 1, 2, 3, … heads; as K and V planes where it is two runs."""
    if len(layer.owned.runs) == 2 and page.planes == 2:
        yield Edit(two_plane_page(layer, layout), block_dim=1)
        return
    columns = page.planes * page.heads * page.width
    for heads in range(1, min(columns, MOST_SYNTHETIC_HEADS) + 1):
        if columns % heads == 0:
            yield Edit(opaque_page(layer, layout, page.dtype, page.slots, columns // heads, heads))


def _applied(edited: list[EditedLayer], same: tuple[AlikeLayers, ...]) -> dict[tuple[int, str], tuple[str, ...]]:
    indices: dict[tuple[int, str], list[int]] = {}
    for alike in same:
        if alike.paging.rule is not None:
            indices.setdefault((alike.group, alike.paging.rule), []).extend(alike.indices)
    return {what: tuple(edited[index].layer.name for index in sorted(layers)) for what, layers in indices.items()}


def _rejection(layer: Layer, rule: str | None, refusal: RuleRejected) -> Rejection:
    return Rejection(Stage.EDIT, refusal.reason, rule, layer.group, (layer.name,), refusal.facts)


def _merged(rejections: list[Rejection]) -> Iterator[Rejection]:
    """Refusals that differ only in the layer as one."""
    names: dict[object, list[str]] = {}
    first: dict[object, Rejection] = {}
    for rejection in rejections:
        key = (rejection.reason, rejection.rule, rejection.group, tuple(rejection.facts.items()))
        names.setdefault(key, []).extend(rejection.layer_names)
        first.setdefault(key, rejection)
    for what, rejection in first.items():
        yield replace(rejection, layer_names=tuple(dict.fromkeys(names[what])))
