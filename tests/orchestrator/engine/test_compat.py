"""The facts of vLLM's specs, as the installed release spells them, and releases that spell nothing."""

import pickle
from fractions import Fraction
from types import ModuleType, SimpleNamespace

import pytest

from orchestrator.engine import compat
from orchestrator.engine.edits import validate_kv_cache_groups
from orchestrator.engine.observe import leaf_spec, observe
from stages.errors import EngineUnsupported, KVRegError, Reason
from stages.model import Kind
from tests.compat.specs import BLOCK_SIZE, EXPECTED, build, spec_classes

pytestmark = pytest.mark.engine

REFUSED_KINDS = {Kind.CROSS_ATTENTION, Kind.ENCODER_ONLY_ATTENTION, Kind.UNKNOWN}
SERVED_KINDS = set(Kind) - REFUSED_KINDS


def test_each_kind_of_vllm_is_mapped_or_listed_as_refused(planning: ModuleType) -> None:
    """vLLM grows a kind of cache, and this fails before a user's engine does."""
    kinds = {member.value for member in planning.interface.KVCacheSpecKind}
    assert kinds == {str(kind) for kind in SERVED_KINDS | REFUSED_KINDS}


def test_each_spec_class_of_vllm_has_its_kind(planning: ModuleType) -> None:
    """vLLM grows a spec class, and this fails by its name until someone has said what it is."""
    classes = spec_classes(planning.interface)
    assert classes.keys() <= EXPECTED.keys()
    for name, cls in classes.items():
        leaf = leaf_spec(build(cls))
        assert leaf.kind is EXPECTED[name].kind, name
        assert leaf.prefix_cacheable is not EXPECTED[name].scratch, name


def test_a_kind_nobody_mapped_is_refused_by_name(planning: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind younger than this kvreg is refused with the layers' names, never taken for attention."""
    monkeypatch.setattr(planning.interface, "get_kv_cache_spec_kind", lambda spec: SimpleNamespace(value="holographic"))
    spec = build(spec_classes(planning.interface)["FullAttentionSpec"])
    group = planning.interface.KVCacheGroupSpec(["a", "b"], spec)
    config = planning.interface.KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[group])
    with pytest.raises(ValueError, match="unknown_kind") as refused:
        validate_kv_cache_groups(config)
    assert [(rejection.reason, rejection.layer_names) for rejection in refused.value.rejections] == [(Reason.UNKNOWN_KIND, ("a", "b"))]


def test_an_engine_too_old_to_say_kinds_is_refused_in_one_line(planning: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """I run vLLM 0.21: one error says which version I have and which I need, also across a process boundary."""
    spec = build(spec_classes(planning.interface)["FullAttentionSpec"])
    group = planning.interface.KVCacheGroupSpec(["a"], spec)
    config = planning.interface.KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[group])
    monkeypatch.delattr(planning.interface, "get_kv_cache_spec_kind")
    with pytest.raises(EngineUnsupported) as refused:
        observe(config, {})
    error = pickle.loads(pickle.dumps(refused.value))
    assert isinstance(error, KVRegError)
    assert str(error) == f"kvreg cannot read vLLM {compat.engine().version}: it needs 0.22 or newer"
    assert not error.retryable


def test_states_are_counted_as_the_spec_declares_them(planning: ModuleType) -> None:
    """One state for four tokens, four states for one, and one state for a whole block: each is read, none assumed."""
    classes = spec_classes(planning.interface)
    read = {
        "compressed": leaf_spec(build(classes["MLAAttentionSpec"], tokens_per_state=4)),
        "pooled": leaf_spec(build(classes["FullAttentionSpec"], tokens_per_state=Fraction(1, 4))),
        "recurrent": leaf_spec(build(classes["MambaSpec"])),
        "owner's": leaf_spec(build(classes["HiSparseHotSpec"])),
    }
    assert {name: (leaf.num_states, leaf.tokens_per_state) for name, leaf in read.items()} == {
        "compressed": (BLOCK_SIZE // 4, Fraction(4)),
        "pooled": (BLOCK_SIZE * 4, Fraction(1, 4)),
        "recurrent": (1, Fraction(1)),
        "owner's": (BLOCK_SIZE, Fraction(1)),
    }


def test_a_page_without_padding_is_all_content(planning: ModuleType) -> None:
    """Padding is what the spec pads, and nothing else: a padded state's own bytes are known, a plain page is full."""
    classes = spec_classes(planning.interface)
    plain = leaf_spec(build(classes["FullAttentionSpec"]))
    assert plain.unpadded_page_size_bytes == plain.page_size_bytes == BLOCK_SIZE * 2 * 32 * 2 * 2
    state = leaf_spec(build(classes["MambaSpec"], page_size_padded=8192))
    assert (state.unpadded_page_size_bytes, state.page_size_bytes) == (3 * 100 * 2 + 2 * 16 * 16 * 4, 8192)
    aligned = leaf_spec(build(classes["MLAAttentionSpec"], alignment=1024))
    assert (aligned.unpadded_page_size_bytes, aligned.page_size_bytes) == (BLOCK_SIZE * 72 * 2, 14336)
