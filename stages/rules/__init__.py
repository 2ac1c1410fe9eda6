"""The rules, in order: the first that matches a layer edits it; a layer that none matches passes through, and is still proven.

A new layout is one file here, one line in `RULES`, one snapshot and one test (CONTRIBUTING.md).
"""

from stages.rules.fractional_state import FRACTIONAL_STATE_VIEW
from stages.rules.mamba_page import MAMBA_PAGE_VIEW
from stages.rules.mamba_unified import MAMBA_UNIFIED_VIEW
from stages.rules.no_blocks import NO_BLOCKS_VIEW
from stages.rules.reordered_attention import REORDERED_ATTENTION_VIEW
from stages.rules.rule import Rule
from stages.rules.subpaged_attention import SUBPAGED_ATTENTION_VIEW
from stages.rules.subpaged_kv_first import SUBPAGED_KV_FIRST_VIEW
from stages.rules.subpaged_mla import SUBPAGED_MLA_ATTENTION_VIEW

RULES: tuple[Rule, ...] = (
    NO_BLOCKS_VIEW,
    MAMBA_PAGE_VIEW,
    MAMBA_UNIFIED_VIEW,
    FRACTIONAL_STATE_VIEW,
    SUBPAGED_MLA_ATTENTION_VIEW,
    SUBPAGED_KV_FIRST_VIEW,
    SUBPAGED_ATTENTION_VIEW,
    REORDERED_ATTENTION_VIEW,
)
"""Every rule, first match wins."""

__all__ = ["RULES", "Rule"]
