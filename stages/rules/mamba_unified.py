"""`[NB, 1, 1, C]`, all states of a block in one byte tensor: the same bytes, with slots to address them by."""

from stages.model import Layer, Layout
from stages.rules.mamba_page import apply
from stages.rules.rule import Rule


def matches(layer: Layer, layout: Layout) -> bool:
    """Recurrent state registered as one tensor: `[NB, 1, 1, C]`, though its inner dims do not matter."""
    return layer.spec.recurrent and not layer.cache.listed


MAMBA_UNIFIED_VIEW = Rule("mamba-unified-view", "[NB,1,1,C] of states → one page view", matches, apply)
