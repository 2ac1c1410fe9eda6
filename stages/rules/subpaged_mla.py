"""MLA paged by the backend's kernel block: kernel pages of one block merge along their slots."""

from stages.model import MLA_KINDS, Layer, Layout
from stages.rules.rule import Rule, attention_view


def matches(layer: Layer, layout: Layout) -> bool:
    """MLA with several kernel pages a block: `[P, s, C]`, or one head slot on either side of `s`."""
    return layer.spec.kind in MLA_KINDS and layer.pages_per_block > 1


SUBPAGED_MLA_ATTENTION_VIEW = Rule(
    "subpaged-mla-attention-view", "[P,s,C] MLA kernel pages → [NB,num_states,C], same rank", matches, attention_view
)
