"""The stages under the names that LMCache's vLLM connector calls, so that it can be given kvreg's edits in place of its own."""

from collections.abc import Mapping

from orchestrator.engine import compat
from orchestrator.engine.observe import RegisteredCache, observe
from stages.edit import edit
from stages.validate import Refusals, check_groups, validate


def apply_kv_cache_group_edits(
    kv_cache_config: compat.KVCacheConfig | None,
    kv_caches: Mapping[str, RegisteredCache],
    layout_hints: Mapping[str, object] | None = None,
) -> dict[str, RegisteredCache]:
    """A new dict with every key of `kv_caches` in its order: edited layers re-viewed, all others the same objects.

    Every layer that will be transferred is proven, of hybrid models and others alike. `layout_hints["kv_layout"]`
    names the layout; without it the engine's own name or, failing that, the strides decide. Without a config there are
    no groups and no block ids, and nothing is edited. Raises RegistrationRejected (a ValueError) with every refusal.
    """
    if kv_cache_config is None:
        return dict(kv_caches)
    layout = (layout_hints or {}).get("kv_layout")
    edited = edit(validate(observe(kv_cache_config, kv_caches, layout=None if layout is None else str(layout))))
    views: dict[str, RegisteredCache] = {layer.layer.name: layer.view for layer in edited.layers if layer.rule is not None}
    return {name: views.get(name, registered) for name, registered in kv_caches.items()}


def validate_kv_cache_groups(kv_cache_config: compat.KVCacheConfig | None) -> None:
    """Refuse, before any tensor exists, what the groups' specs alone rule out; None skips.

    Raises RegistrationRejected (a ValueError) with every refusal.
    """
    if kv_cache_config is None:
        return
    refusals = Refusals()
    check_groups(observe(kv_cache_config, {}), refusals)
    refusals.raise_if_any()
