"""Runs the border on the vLLM release that imports first, and writes as JSON what it made of every spec class and case.

    PYTHONPATH=<release>:<repository> python -m tests.compat.border <era> <report>

Bytes are checked here, where the tensors are; the test that starts this compares the facts.
"""

import json
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from orchestrator.engine import compat
from orchestrator.engine.edits import apply_kv_cache_group_edits, validate_kv_cache_groups
from orchestrator.engine.observe import leaf_spec, observe
from stages.edit import edit
from stages.engine_groups import engine_groups
from stages.errors import RegistrationRejected
from stages.validate import validate
from tests.compat.blocks import check_blocks
from tests.compat.caches import era_cache, planned_caches
from tests.compat.specs import KERNEL_BLOCK_SIZE, NUM_BLOCKS, build, spec_classes

Groups = list[tuple[dict[str, Any], dict[str, Any]]]
"""Each group's leaf specs by layer, and what its KVCacheGroupSpec has besides."""


class Border:
    """One release's border, in its era's shapes."""

    def __init__(self, era: str) -> None:
        self.era = era
        self.interface = compat.interface()
        self.classes = spec_classes(self.interface)
        self.layouts = ("LBNHC", "LBHNC") if era in "FG" else ("NHD", "HND")

    def config(self, groups: Groups, tensors: list[Any], layout: str | None, **more: Any) -> Any:
        """The release's own KVCacheConfig; a group of several specs is wrapped as the engine wraps it."""
        named = {"kv_cache_layout": layout} if layout is not None and self.era in "FG" else {}
        return self.interface.KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=tensors,
            kv_cache_groups=[self.interface.KVCacheGroupSpec(list(leaves), self.group_spec(leaves), **group) for leaves, group in groups],
            **named,
            **more,
        )

    def group_spec(self, leaves: dict[str, Any]) -> Any:
        """The group's spec: the layers' own if it is one, else the wrapper."""
        specs = list(leaves.values())
        if all(spec == specs[0] for spec in specs):
            return specs[0]
        return self.interface.UniformTypeKVCacheSpecs(block_size=specs[0].block_size, kv_cache_specs=leaves)

    def caches(self, groups: Groups, layout: str, kernel_blocks: dict[str, int]) -> tuple[list[Any], dict[str, Any]]:
        """What the release registers: from 0.29 by its own code, before by its era's shapes."""
        leaves = {name: spec for specs, _ in groups for name, spec in specs.items()}
        if self.era in "FG":
            return planned_caches(self.interface, leaves, layout, kernel_blocks)
        kinds = {name: compat.kind(spec).value for name, spec in leaves.items()}
        return [], {name: era_cache(self.era, kinds[name], spec, layout, kernel_blocks.get(name)) for name, spec in leaves.items()}

    def outcome(self, groups: Groups, kernel_blocks: dict[str, int] | None = None, **more: Any) -> dict[str, Any]:
        """What becomes of these groups under both layouts: bytes checked and rules applied, or the refusals."""
        return {layout: self.run(groups, layout, kernel_blocks or {}, **more) for layout in self.layouts}

    def run(self, groups: Groups, layout: str, kernel_blocks: dict[str, int], **more: Any) -> dict[str, Any]:
        """observe → validate → edit → engine groups, then every layer's bytes."""
        tensors, caches = self.caches(groups, layout, kernel_blocks)
        config = self.config(groups, tensors, layout, **more)
        offer = observe(config, caches, layout=None if self.era in "FG" else layout)
        assert offer.layout == layout, offer.layout
        assert list(offer.caches) == list(caches)
        try:
            plan = engine_groups(edit(validate(offer)))
        except RegistrationRejected as refused:
            return {"refused": sorted({rejection.reason for rejection in refused.rejections})}
        views = apply_kv_cache_group_edits(config, caches, {"kv_layout": layout})
        assert list(views) == list(caches)
        for layer in plan.layers:
            name = layer.layer.name
            assert (views[name] is caches[name]) == (layer.rule is None), name
        return {
            "checked_bytes": check_blocks(plan),
            "rules": sorted({layer.rule for layer in plan.layers if layer.rule}),
            "slots": sorted({group.slots_per_block for group in plan.groups}),
            "tokens_per_block": sorted({group.tokens_per_block for group in plan.groups}),
            "excluded": {layer.name: layer.exclusion for layer in plan.excluded},
            "num_blocks": [group.num_blocks for group in offer.groups],
        }

    def specs(self) -> dict[str, Any]:
        """Every class alone, two layers of it."""
        return {name: self.spec(build(cls)) for name, cls in self.classes.items()}

    def spec(self, spec: Any) -> dict[str, Any]:
        """A spec as the border reads it, and the outcome of a group of it."""
        leaf = leaf_spec(spec)
        return {
            "kind": leaf.kind,
            "block_size": leaf.block_size,
            "num_states": leaf.num_states,
            "tokens_per_state": str(leaf.tokens_per_state),
            "page_size_bytes": leaf.page_size_bytes,
            "unpadded_page_size_bytes": leaf.unpadded_page_size_bytes,
            "sliding_window_tokens": leaf.sliding_window_tokens,
            "mamba_cache_mode": leaf.mamba_cache_mode,
            "prefix_cacheable": leaf.prefix_cacheable,
            "dcp_sharded": leaf.dcp_sharded,
            "described": dict(leaf.described),
            "outcome": self.outcome([({"a": spec, "b": spec}, {})]),
        }

    def cases(self) -> dict[str, Any]:
        """What is not one class alone."""
        attention, mla, mamba = (self.classes[name] for name in ("FullAttentionSpec", "MLAAttentionSpec", "MambaSpec"))
        plain = build(attention)
        state = build(mamba, page_size_padded=plain.page_size_bytes)
        hybrid: Groups = [({"m.0": state, "m.1": state}, {}), ({"a.0": plain, "a.1": plain}, {})]
        kernel_blocks = {"a.0": KERNEL_BLOCK_SIZE, "a.1": KERNEL_BLOCK_SIZE}
        compressed = build(mla, **{self.ratio_field(): 4})
        cases: dict[str, Any] = {
            "hybrid": self.outcome(hybrid, kernel_blocks),
            "split": self.outcome([({"a.0": plain, "a.1": plain}, {})], kernel_blocks),
            "wrapped": self.outcome([({"a": plain, "b": build(attention, head_size=48)}, {})]),
            "compressed": self.spec(compressed),
            "padded": self.spec(build(mla, page_size_padded=16384)),
            "mamba_none": self.refused_early(build(mamba, mamba_cache_mode="none")),
        }
        if self.era in "FG":
            cases["fraction"] = self.spec(build(attention, tokens_per_state=Fraction(1, 4)))
            cases["not_transferable"] = self.outcome([({"a": plain}, {}), ({"b": plain}, {"enable_kv_transfer": False})])
        if hasattr(self.interface.KVCacheGroupSpec([], plain), "host_resident"):
            host: Groups = [({"a": plain}, {}), ({"b": plain}, {"host_resident": True})]
            cases["host_resident"] = self.outcome(host, hisparse_host_num_blocks=9)
            cases["host_blocks"] = [
                group.num_blocks for group in observe(self.config(host, [], None, hisparse_host_num_blocks=9), {}).groups
            ]
        return cases

    def ratio_field(self) -> str:
        """What a compressed spec calls its tokens per state."""
        return "tokens_per_state" if self.era in "FG" else "compress_ratio"

    def refused_early(self, spec: Any) -> list[str]:
        """What the check before any tensor exists refuses."""
        try:
            validate_kv_cache_groups(self.config([({"a": spec}, {})], [], None))
        except ValueError as refused:
            return [rejection.reason for rejection in refused.rejections]
        return []

    def layout_names(self) -> dict[str, str | None]:
        """What the release itself says its layout is, where the caller has not said; `VLLM_KV_CACHE_LAYOUT` is set."""
        untold = self.config([], [], None)
        return {
            "config": compat.layout_name(self.config([], [], "BLHNC"), None, on_cpu=False),
            "nobody": compat.layout_name(untold, None, on_cpu=False),
            "on_cpu": compat.layout_name(untold, None, on_cpu=True),
            "vllm_config": compat.layout_name(untold, self.vllm_config(), on_cpu=False),
        }

    def vllm_config(self) -> Any:
        """A config that has resolved its layout; the real one where asking for the layout needs a real one."""
        if self.era in "FG":
            return SimpleNamespace(cache_config=SimpleNamespace(kv_cache_layout="LBHNC"))
        for name in ("gguf", "gguf.constants", "gguf.quants"):
            sys.modules.setdefault(name, MagicMock())  # 0.22's config imports it, and nothing here uses it
        from vllm.config import VllmConfig

        return VllmConfig()


def main(era: str, report: Path) -> None:
    """Write the report of this release."""
    border = Border(era)
    engine = compat.engine()
    kinds = [member.value for member in border.interface.KVCacheSpecKind]
    found = {"engine": [engine.name, engine.version], "kinds": kinds, "specs": border.specs(), "cases": border.cases()}
    report.write_text(json.dumps(found | {"layouts": border.layout_names()}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
