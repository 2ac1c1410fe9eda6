"""Attention paged by the backend's kernel block: one block id's kernel pages become one page."""

from stages.model import Layer, Layout
from stages.rules.rule import Rule, attention_view


def matches(layer: Layer, layout: Layout) -> bool:
    """Attention with several kernel pages a block, of any rank."""
    return not layer.spec.recurrent and layer.pages_per_block > 1


SUBPAGED_ATTENTION_VIEW = Rule(
    "subpaged-attention-view", "kernel pages of one block → one page of the block's slots", matches, attention_view
)
