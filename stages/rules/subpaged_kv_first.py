"""`[2, P, s, H, D]` with K and V outermost in memory: each block is a run of kernel pages in each plane."""

from stages.model import Layer, Layout
from stages.rules.rule import Rule, attention_view


def matches(layer: Layer, layout: Layout) -> bool:
    """Attention of several kernel pages a block whose block owns one run in each of two planes."""
    return not layer.spec.recurrent and layer.block_dim == 1 and layer.pages_per_block > 1 and len(layer.owned.runs) == 2


SUBPAGED_KV_FIRST_VIEW = Rule(
    "subpaged-kv-first-attention-view", "[2,P,s,H,D] planes of kernel pages → [2,NB,BS,…]", matches, attention_view
)
