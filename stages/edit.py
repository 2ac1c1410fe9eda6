"""edit: each layer re-paged to block granularity by the first rule that matches, then proven, edited or not.

Views only: an edited layer shares its raw tensor's storage.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from stages.errors import Reason, RegistrationRejected, Rejection, RuleRejected, Stage, reject
from stages.model import Edited, EditedLayer, Layer, Layout, Validated
from stages.pages import opaque_page, read_page, two_plane_page
from stages.proof import overlapping, prove
from stages.rules import RULES
from stages.rules.rule import Edit, Rule

IDENTITY_SPLIT_VIEW = "identity-split-view"
"""The one edit that is not a rule, because no layer alone calls for it: see `_told_apart`."""

MOST_SYNTHETIC_HEADS = 1024
"""How many heads a page may be split over to be told apart; a page that needs more is refused."""


def edit(validated: Validated, rules: tuple[Rule, ...] = RULES) -> Edited:
    """Every layer as the transfer will read it, or RegistrationRejected with every layer that cannot be proven."""
    rejections: list[Rejection] = []
    edited: list[EditedLayer] = []
    for layer in validated.layers:
        rule = next((rule for rule in rules if rule.matches(layer, validated.layout)), None)
        try:
            edited.append(_edit(layer, rule, validated.layout))
        except RuleRejected as refusal:
            rejections.append(_rejection(layer, rule.name if rule else None, refusal))
    edited = list(_told_apart(edited, validated.layout, rejections))
    rejections += [_rejection(other.layer, other.rule, refusal) for other, refusal in overlapping(edited)]
    if rejections:
        raise RegistrationRejected(tuple(_merged(rejections)))
    return Edited(validated.offer, validated.layout, tuple(edited), validated.excluded)


def _edit(layer: Layer, rule: Rule | None, layout: Layout) -> EditedLayer:
    """One layer edited and proven. Raises RuleRejected."""
    edit = rule.apply(layer, layout) if rule else Edit(layer.raw, layer.block_dim, opaque=False)
    return _proven(layer, edit, rule.name if rule else None, layout)


def _proven(layer: Layer, edit: Edit, rule: str | None, layout: Layout) -> EditedLayer:
    if edit.view.untyped_storage()._cdata != layer.raw.untyped_storage()._cdata:
        raise reject(Reason.NOT_A_VIEW, shape=tuple(edit.view.shape))
    page = read_page(edit.view, layout)
    if page is None or (len(layer.cache.tensors) > 1 and rule is None):
        raise reject(Reason.UNREADABLE_VIEW, kind=layer.spec.kind, shape=tuple(edit.view.shape), stride=edit.view.stride())
    prove(layer, page)
    if edit.view.shape[edit.block_dim : edit.block_dim + 1] != (layer.owned.num_blocks,):
        raise reject(Reason.BLOCK_COUNT, shape=tuple(edit.view.shape), block_dim=edit.block_dim, num_blocks=layer.owned.num_blocks)
    return EditedLayer(layer, edit.view, edit.block_dim, page, rule, edit.opaque)


def _told_apart(edited: list[EditedLayer], layout: Layout, rejections: list[Rejection]) -> Iterator[EditedLayer]:
    """Layers of one group that look alike to the transfer but must be copied differently, made to look different.

    The transfer copies layers of one identity by the first one's stride, tokens and window, and takes layers whose views
    have one shape and dtype for one format, the first one's. A later layer that differs is viewed with its slot's bytes
    split over more synthetic heads: the same bytes under a shape and an identity of their own.
    """
    seen: dict[object, object] = {}
    for layer in edited:
        told = next((view for view in _lookalikes(layer, layout) if _agrees(seen, view)), None)
        if told is None:
            stride, tokens = layer.page.planned.stride_bytes, layer.layer.tokens_per_block
            refusal = reject(Reason.TRANSFER_IDENTITY_SHARED, block_stride_bytes=stride, tokens_per_block=tokens)
            rejections.append(_rejection(layer.layer, layer.rule, refusal))
        else:
            seen.update(_assumed(told))
            yield told


def _assumed(edited: EditedLayer) -> dict[object, object]:
    """What the transfer takes for granted of every layer of a group: by identity, and by shape and dtype."""
    layer, page = edited.layer, edited.page
    return {
        (layer.group, page.identity): (page.planned.stride_bytes, layer.tokens_per_block, layer.spec.window_tokens, layer.spec.recurrent),
        (layer.group, tuple(edited.view.shape), page.dtype): page.format,
    }


def _agrees(seen: dict[object, object], edited: EditedLayer) -> bool:
    return all(seen.get(key, value) == value for key, value in _assumed(edited).items())


def _lookalikes(edited: EditedLayer, layout: Layout) -> Iterator[EditedLayer]:
    """The layer itself, then the same bytes under other identities, each proven."""
    yield edited
    for edit in _other_pages(edited, layout):
        with suppress(RuleRejected):
            yield _proven(edited.layer, edit, edited.rule or IDENTITY_SPLIT_VIEW, layout)


def _other_pages(edited: EditedLayer, layout: Layout) -> Iterator[Edit]:
    """A page's bytes as one run a block, its slots split over 1, 2, 3, … heads; as K and V planes where it is two runs."""
    layer, page = edited.layer, edited.page
    if len(layer.owned.runs) > 1 and page.planes == 2:
        yield Edit(two_plane_page(layer, layout), block_dim=1)
        return
    columns = page.planes * page.heads * page.width
    for heads in range(1, min(columns, MOST_SYNTHETIC_HEADS) + 1):
        if columns % heads == 0:
            yield Edit(opaque_page(layer, layout, page.dtype, page.slots, columns // heads, heads))


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
