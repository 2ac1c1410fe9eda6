"""The names LMCache's connector calls: the same keys and order out, views where a layer needs one, a ValueError if refused."""

from types import ModuleType
from typing import Any

import pytest
import torch

from orchestrator.engine.edits import apply_kv_cache_group_edits, validate_kv_cache_groups
from stages.errors import Reason, RegistrationRejected
from tests.compat.specs import BLOCK_SIZE, KERNEL_BLOCK_SIZE, build, spec_classes

pytestmark = pytest.mark.engine

NUM_BLOCKS = 9


def _planned(planning: ModuleType, layout: str = "LBNHC", **state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A hybrid's config and caches, its attention split into kernel pages, registered in an order of its own."""
    classes = spec_classes(planning.interface)
    attention = build(classes["FullAttentionSpec"])
    recurrent = build(classes["MambaSpec"], page_size_padded=attention.page_size_bytes, **state)
    (planned,) = planning.configs(planning.vllm_config(layout, NUM_BLOCKS), [{"b": recurrent, "a": attention}])
    caches = planning.allocate(planned, KERNEL_BLOCK_SIZE)
    return planned, {name: caches[name] for name in sorted(caches)}


@pytest.mark.parametrize("hints", [None, {}, {"kv_layout": "NHD"}])
def test_layers_are_re_viewed_and_keys_kept(planning: ModuleType, hints: dict[str, str] | None) -> None:
    """My connector gets back the dict it gave, with views of the same memory in which a page is a block."""
    planned, caches = _planned(planning)
    given = dict(caches)
    edited = apply_kv_cache_group_edits(planned, caches) if hints is None else apply_kv_cache_group_edits(planned, caches, hints)
    assert list(edited) == ["a", "b"]
    assert edited is not caches
    assert caches == given
    for name, view in edited.items():
        assert isinstance(view, torch.Tensor)
        assert view.untyped_storage().data_ptr() == caches[name].untyped_storage().data_ptr()
        assert view.shape[:2] == (NUM_BLOCKS, BLOCK_SIZE) or view.shape[0::2] == (NUM_BLOCKS, BLOCK_SIZE)


def test_a_view_and_its_layer_are_the_same_memory(planning: ModuleType) -> None:
    """What the engine writes into a block is in that block of the view, and in no other."""
    planned, caches = _planned(planning)
    view = apply_kv_cache_group_edits(planned, caches)["a"]
    assert isinstance(view, torch.Tensor)
    rows = BLOCK_SIZE // KERNEL_BLOCK_SIZE
    caches["a"][4 * rows : 5 * rows] = 7.0
    assert bool((view[4] == 7.0).all())
    assert not bool(view[[0, 1, 2, 3, 5, 6, 7, 8]].any())


def test_layers_that_need_no_edit_are_the_same_objects(planning: ModuleType) -> None:
    """A model paged by whole blocks, its scratch and its shared layers pass through untouched."""
    classes = spec_classes(planning.interface)
    groups = [
        planning.interface.KVCacheGroupSpec(["a"], build(classes["FullAttentionSpec"])),
        planning.interface.KVCacheGroupSpec(["ring"], build(classes["CircularBufferSpec"])),
    ]
    config = planning.interface.KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups, kv_cache_layout="LBHNC")
    attention = torch.zeros(4, 2, BLOCK_SIZE, 64, dtype=torch.bfloat16)
    caches: dict[str, Any] = {"shared": attention, "ring": torch.zeros(4, 2, BLOCK_SIZE, 64), "a": attention}
    edited = apply_kv_cache_group_edits(config, caches)
    assert list(edited) == ["shared", "ring", "a"]
    assert all(edited[name] is caches[name] for name in caches)


def test_without_a_config_nothing_is_edited() -> None:
    """A connector started without a config gets its caches back, in a dict of its own."""
    caches = {"a": torch.zeros(3)}
    edited = apply_kv_cache_group_edits(None, caches)
    assert edited is not caches
    assert edited == caches
    validate_kv_cache_groups(None)


def test_a_refused_layer_is_a_value_error_with_every_reason(planning: ModuleType) -> None:
    """What LMCache's connector catches as ValueError carries each refused layer and why."""
    planned, caches = _planned(planning)
    caches["a"], caches["stray"] = caches["a"][:-1], torch.zeros(5)
    with pytest.raises(ValueError, match="pages_per_block") as refused:
        apply_kv_cache_group_edits(planned, caches)
    assert isinstance(refused.value, RegistrationRejected)
    assert {(rejection.reason, rejection.layer_names) for rejection in refused.value.rejections} == {
        (Reason.PAGES_PER_BLOCK, ("a",)),
        (Reason.CACHE_WITHOUT_GROUP, ("stray",)),
    }


def test_groups_are_refused_all_at_once_before_tensors_exist(planning: ModuleType) -> None:
    """At connector start I learn of every group that cannot be served, not of the first."""
    classes = spec_classes(planning.interface)
    specs = [
        build(classes["CrossAttentionSpec"]),
        build(classes["MambaSpec"], mamba_cache_mode="none"),
        build(classes["FullAttentionSpec"]),
        build(classes["EncoderOnlyAttentionSpec"]),
    ]
    groups = [planning.interface.KVCacheGroupSpec([f"l.{index}"], spec) for index, spec in enumerate(specs)]
    config = planning.interface.KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)
    with pytest.raises(ValueError, match="--mamba-cache-mode align") as refused:
        validate_kv_cache_groups(config)
    assert isinstance(refused.value, RegistrationRejected)
    assert [(rejection.group, rejection.reason) for rejection in refused.value.rejections] == [
        (0, Reason.CROSS_ATTENTION),
        (1, Reason.MAMBA_CACHE_MODE),
        (3, Reason.ENCODER_ONLY_ATTENTION),
    ]
    config.kv_cache_groups = groups[2:3]
    validate_kv_cache_groups(config)
