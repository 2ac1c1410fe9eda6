"""edit: each layer re-paged to block granularity by the first rule that matches, then proven, edited or not.

Views only: an edited layer shares its raw tensor's storage.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stages.errors import Reason, RegistrationRejected, Rejection, RuleRejected, Stage, reject
from stages.model import Edited, EditedLayer, Layer, Layout, Validated
from stages.pages import opaque_page, read_page
from stages.proof import overlapping, prove
from stages.rules import RULES
from stages.rules.rule import Edit, Rule

IDENTITY_SPLIT_VIEW = "identity-split-view"
"""The one edit that is not a rule, because no layer alone calls for it: see `_told_apart`."""


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
    return EditedLayer(layer, edit.view, edit.block_dim, page, rule, edit.opaque)


@dataclass(frozen=True, slots=True)
class _Copy:
    """What one transfer kernel assumes of all layers of one identity."""

    stride_bytes: int
    tokens_per_block: int
    window_tokens: int
    recurrent: bool


def _told_apart(edited: list[EditedLayer], layout: Layout, rejections: list[Rejection]) -> Iterator[EditedLayer]:
    """Layers of one group that look alike to the transfer but differ in stride, tokens or window, made to look different.

    The transfer groups by identity and copies a group by its first layer's stride. The later layer's page is viewed
    with its slot's bytes split over more synthetic heads: the same bytes under an identity of their own.
    """
    seen: dict[object, _Copy] = {}
    for layer in edited:
        copy = _Copy(
            layer.page.planned.stride_bytes, layer.layer.tokens_per_block, layer.layer.spec.window_tokens, layer.layer.spec.recurrent
        )
        try:
            told = next(view for view in _lookalikes(layer, layout) if seen.get((layer.layer.group, view.page.identity), copy) == copy)
        except StopIteration:
            facts = reject(Reason.TRANSFER_IDENTITY_SHARED, block_stride_bytes=copy.stride_bytes, tokens_per_block=copy.tokens_per_block)
            rejections.append(_rejection(layer.layer, layer.rule, facts))
            continue
        seen[layer.layer.group, told.page.identity] = copy
        yield told


def _lookalikes(edited: EditedLayer, layout: Layout) -> Iterator[EditedLayer]:
    """The layer itself, then the same bytes under other identities: one run a block, its slots split over 2, 3, … heads."""
    yield edited
    page = edited.page
    if page.planes == 2:
        return
    columns = page.heads * page.width
    for heads in range(2, columns + 1):
        if columns % heads == 0:
            view = opaque_page(edited.layer, layout, page.dtype, page.slots, heads, columns // heads)
            other = read_page(view, layout)
            if other is not None and other.planned == page.planned:
                yield replace(edited, view=view, block_dim=0, page=other, rule=edited.rule or IDENTITY_SPLIT_VIEW, opaque=True)


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
