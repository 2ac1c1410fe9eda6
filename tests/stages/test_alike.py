"""Layers that differ only in where they begin share a proof: what does depend on that is still judged for each of them."""

from dataclasses import replace

import pytest
import torch

from stages.edit import edit
from stages.engine_groups import engine_groups
from stages.errors import Reason, RegistrationRejected
from stages.model import Edited, EditedLayer, Engine, Kind, LayerCache, LeafSpec, Offer, OfferedGroup
from stages.rules import RULES, Rule
from stages.rules.rule import Edit
from stages.validate import validate
from tests.offers import cache, hybrid

BLOCKS, SLOTS, CONTENT = 3, 4, 16
PAGE_BYTES = SLOTS * CONTENT


def layers(starts: list[int], steps: list[int] | None = None, storage_bytes: int = 1 << 16, page_bytes: int = PAGE_BYTES) -> Offer:
    """Layers of `[NB, SLOTS, CONTENT]` bytes in one storage, each at its own first byte and, if given, block stride."""
    memory = torch.zeros(storage_bytes, dtype=torch.uint8)
    steps = steps or [page_bytes] * len(starts)
    caches = {
        f"l.{index}": LayerCache((cache(memory.as_strided((BLOCKS, SLOTS, CONTENT), (step, CONTENT, 1), start)),))
        for index, (start, step) in enumerate(zip(starts, steps, strict=True))
    }
    spec = LeafSpec(Kind.MLA_ATTENTION, SLOTS, page_bytes, SLOTS)
    return Offer(Engine("test", "0"), (OfferedGroup(tuple(caches), BLOCKS, dict.fromkeys(caches, spec)),), caches, "NHD")


def edited(offer: Offer, rules: tuple[Rule, ...] = RULES) -> Edited:
    """The offer, edited and proven."""
    return edit(validate(offer), rules)


def wider(extra: int) -> Rule:
    """A rule that takes `extra` bytes more of each block than it owns."""
    shape, stride = (BLOCKS, SLOTS, CONTENT + extra // SLOTS), (PAGE_BYTES + extra, CONTENT + extra // SLOTS, 1)
    return Rule("wider", "wider", lambda layer, _: True, lambda layer, _: Edit(layer.raw.as_strided(shape, stride)))


def refusals(offer: Offer, *rules: Rule) -> dict[Reason, set[str]]:
    """Which layers are refused, by reason."""
    with pytest.raises(RegistrationRejected) as caught:
        edited(offer, rules)
    told: dict[Reason, set[str]] = {}
    for rejection in caught.value.rejections:
        told.setdefault(rejection.reason, set()).update(rejection.layer_names)
    return told


def test_a_rule_looks_at_one_of_many_layers_that_are_alike() -> None:
    """Each of forty layers of one shape is viewed in its own place, though the rule was asked once."""
    asked: list[str] = []

    def apply(layer: object, _: object) -> Edit:
        asked.append(layer.name)  # type: ignore[attr-defined]
        return Edit(layer.raw.as_strided((BLOCKS, SLOTS, 1, CONTENT), (PAGE_BYTES, CONTENT, CONTENT, 1)))  # type: ignore[attr-defined]

    starts = [index * BLOCKS * PAGE_BYTES for index in range(40)]
    done = edited(layers(starts), (Rule("asked", "asked", lambda layer, _: True, apply),))
    assert asked == ["l.0"]
    assert [layer.view.storage_offset() for layer in done.layers] == starts
    assert [layer.page.planned.start for layer in done.layers] == starts
    assert done.applied == {(0, "asked"): tuple(f"l.{index}" for index in range(40))}
    assert engine_groups(done).groups[0].layer_indices == tuple(range(40))


def test_the_last_of_them_is_refused_where_the_storage_ends_in_its_padding() -> None:
    """A page that is wider than its content fits every layer but the one whose last page is cut short."""
    step = PAGE_BYTES + 16
    offer = layers([0, BLOCKS * step, 2 * BLOCKS * step], page_bytes=step)
    cut_short = {name: smaller(held, 3 * BLOCKS * step - 8) for name, held in offer.caches.items()}
    assert refusals(replace(offer, caches=cut_short), wider(16)) == {Reason.PAST_STORAGE: {"l.2"}}


def smaller(held: LayerCache, size_bytes: int) -> LayerCache:
    """A cache that says its storage is smaller."""
    return LayerCache(tuple(replace(part, storage_size_bytes=size_bytes) for part in held.tensors), held.listed)


@pytest.mark.parametrize("shift", [1, PAGE_BYTES // 2, BLOCKS * PAGE_BYTES - 1])
def test_one_of_many_that_begins_too_early_is_refused_with_its_neighbour(shift: int) -> None:
    """Proven alike is not proven apart: bytes of another layer are looked for among all of them."""
    starts = [index * BLOCKS * PAGE_BYTES for index in range(8)]
    starts[5] -= shift
    assert refusals(layers(starts), *RULES) == {Reason.BYTES_OF_ANOTHER_LAYER: {"l.4", "l.5"}}


def test_layers_whose_blocks_interleave_are_apart() -> None:
    """A block of each of fifty layers lies beside those of the others; none touches another, and none is refused."""
    step = 50 * PAGE_BYTES
    done = edited(layers([index * PAGE_BYTES for index in range(50)], [step] * 50))
    assert len(done.layers) == 50


def test_one_of_many_that_interleave_and_meet_is_refused() -> None:
    """One layer of fifty begins a byte too early, and only it and the one it meets are refused."""
    step = 50 * PAGE_BYTES
    starts = [index * PAGE_BYTES for index in range(50)]
    starts[30] -= 1
    assert refusals(layers(starts, [step] * 50), *RULES) == {Reason.BYTES_OF_ANOTHER_LAYER: {"l.29", "l.30"}}


def test_a_block_that_wraps_around_the_stride_meets_the_first_layer() -> None:
    """The last of the layers that share a stride may reach into the next block's first: that is found, too."""
    step = 10 * PAGE_BYTES
    starts = [16, *(index * PAGE_BYTES for index in range(2, 9)), 9 * PAGE_BYTES + 17]
    assert refusals(layers(starts, [step] * 9), *RULES) == {Reason.BYTES_OF_ANOTHER_LAYER: {"l.0", "l.8"}}


def test_equal_specs_need_not_be_one_object() -> None:
    """What one spec object for all layers makes, an equal one for each makes as well."""
    offer = hybrid()
    groups = tuple(replace(group, specs={name: replace(spec) for name, spec in group.specs.items()}) for group in offer.groups)
    one, each = edited(offer), edited(replace(offer, groups=groups))

    def views(done: Edited) -> list[tuple[object, ...]]:
        return [(tuple(layer.view.shape), layer.view.stride(), layer.view.storage_offset(), layer.rule) for layer in done.layers]

    assert views(one) == views(each)
    assert [group.layout_fingerprint for group in engine_groups(one).groups] == [g.layout_fingerprint for g in engine_groups(each).groups]


def test_an_edited_layer_prints_without_its_bytes() -> None:
    """asyncio prints results in debug mode, and printing a tensor would read the device."""
    layer: EditedLayer = edited(hybrid()).layers[0]
    assert "tensor(" not in repr(layer)
    assert layer.layer.name in repr(layer)


def test_groups_of_layers_that_are_alike_stay_apart() -> None:
    """Two engine groups of one spec and one shape have block ids of their own, and so they are two groups of the plan."""
    offer = layers([0, 1024])
    spec = offer.groups[0].specs["l.0"]
    two = replace(offer, groups=tuple(OfferedGroup((name,), BLOCKS, {name: spec}) for name in ("l.0", "l.1")))
    assert [(group.engine_group_id, group.layer_names) for group in engine_groups(edited(two)).groups] == [(0, ("l.0",)), (1, ("l.1",))]
