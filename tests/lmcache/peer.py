"""LMCache's own way from a vLLM registration to its kernels' descriptors, run on a snapshot through an adapter.

The adapter stands where vLLM stands in production: it hands LMCache objects of vLLM's own spec classes, whose attributes
answer what the snapshot recorded (so that a release's page sizes and states are that release's, whichever vLLM is installed),
the registered tensors as they were, on `meta`, and the layout by LMCache's own translation of its name. From there on it is
LMCache's code alone: its edits, its group infos, its format discovery and its kernel groups.

Imports LMCache and vLLM's interface, which takes seconds.
"""

from types import SimpleNamespace
from typing import Any

from lmcache.integration.vllm.kv_cache_group_edits import apply_kv_cache_group_edits
from lmcache.integration.vllm.kv_cache_groups import create_engine_group_infos_from_vllm
from lmcache.integration.vllm.utils import translate_vllm_kv_cache_layout
from vllm.v1 import kv_cache_interface

from stages.model import Kind, LeafSpec, Offer, OfferedGroup
from tests.lmcache.reading import Served

CLASSES = {
    Kind.FULL_ATTENTION: "FullAttentionSpec",
    Kind.MLA_ATTENTION: "MLAAttentionSpec",
    Kind.SLIDING_WINDOW: "SlidingWindowSpec",
    Kind.SLIDING_WINDOW_MLA: "SlidingWindowMLASpec",
    Kind.MAMBA: "MambaSpec",
}
"""The class of a kind, for a snapshot whose own class the installed vLLM does not have any more."""


def served(offer: Offer) -> Served:
    """What LMCache's server makes of an offer after LMCache's own edits. Raises what LMCache raises."""
    config = SimpleNamespace(
        kv_cache_groups=[_group(group) for group in offer.groups],
        has_mamba_layers=any(spec.recurrent for group in offer.groups for spec in group.leaf_specs),
    )
    caches: dict[str, Any] = {}
    for name, cache in offer.caches.items():
        tensors = [part.tensor for part in cache.tensors]
        caches[name] = tensors if cache.listed else tensors[0]
    hints = {} if offer.layout is None else {"kv_layout": translate_vllm_kv_cache_layout(str(offer.layout))}
    edited = apply_kv_cache_group_edits(config, caches, hints)
    infos = create_engine_group_infos_from_vllm(config, edited, hints, offer.dcp_size)
    return Served(list(edited), list(edited.values()), infos, hints)


def _group(group: OfferedGroup) -> Any:
    """A group as vLLM has it: one spec, or, where its layers have specs of their own, the container of them."""
    specs = {name: _spec(group.specs[name]) for name in group.layer_names}
    first = specs[group.layer_names[0]]
    block_size = group.block_size or first.block_size
    held = first if len(group.leaf_specs) == 1 else SimpleNamespace(kv_cache_specs=specs, block_size=block_size)
    return SimpleNamespace(layer_names=list(group.layer_names), kv_cache_spec=held)


def _spec(leaf: LeafSpec) -> Any:
    """An object of the spec's vLLM class that answers with the snapshot's numbers."""
    described = dict(leaf.described)
    name = str(described.get("class"))
    answers: dict[str, Any] = {
        "block_size": leaf.block_size,
        "page_size_bytes": leaf.page_size_bytes,
        "num_states": leaf.num_states,
        "tokens_per_state": leaf.tokens_per_state,
        "compress_ratio": max(leaf.tokens_per_state, 1),
        "sliding_window": leaf.sliding_window_tokens,
        "mamba_cache_mode": leaf.mamba_cache_mode,
        "prefix_cacheable": leaf.prefix_cacheable,
    }
    if name.startswith("TQ"):  # not recorded, and LMCache asks only whether it is more than nothing
        answers["tq_slot_size"] = 1
    base = getattr(kv_cache_interface, name, None) or getattr(kv_cache_interface, CLASSES[leaf.kind])
    return object.__new__(type(name, (base,), answers))
