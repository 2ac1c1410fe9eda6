"""Attention whose dims lie in memory in another order than the layout's name says: the transfer would misread its slots."""

from stages.model import Layer, Layout
from stages.rules.rule import Rule, attention_view, reads_well


def matches(layer: Layer, layout: Layout) -> bool:
    """One page a block, which the transfer cannot read or reads with other slots than the spec's."""
    return not layer.spec.recurrent and len(layer.cache.tensors) == 1 and not reads_well(layer.raw, layer, layout)


REORDERED_ATTENTION_VIEW = Rule(
    "reordered-attention-view", "a page in another dim order than the layout's → a page the transfer reads", matches, attention_view
)
