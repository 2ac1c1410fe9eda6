"""Several states a token (block pooling): the page is opaque, one slot a token."""

from stages.model import Layer, Layout
from stages.rules.rule import Edit, Rule, opaque_view


def matches(layer: Layer, layout: Layout) -> bool:
    """Attention that stores more states a block than the block has tokens."""
    return not layer.spec.recurrent and layer.spec.num_states > layer.spec.block_size and len(layer.owned.runs) == 1


def apply(layer: Layer, layout: Layout) -> Edit:
    """`[n*r, h, s, c] -> [n, bs, 1, w]`, heads first `[n, 1, bs, w]`: a transfer has no fraction below one slot a token."""
    return opaque_view(layer, layout)


FRACTIONAL_STATE_VIEW = Rule("fractional-state-view", "more states than tokens a block → opaque page, a slot a token", matches, apply)
