"""`[conv, ssm, …]`, a list of states cut from one page: the whole page as one view."""

import torch

from stages.errors import Reason, reject
from stages.model import Layer, Layout
from stages.pages import opaque_page, room_bytes, width_bytes
from stages.rules.rule import Edit, Rule


def matches(layer: Layer, layout: Layout) -> bool:
    """Recurrent state registered as a list."""
    return layer.spec.recurrent and layer.cache.listed


def apply(layer: Layer, layout: Layout) -> Edit:
    """`[[n, …], [n, …]] -> [n, bs, 1, w]`, heads first `[n, 1, bs, w]`, int8: the page from its first state's first byte.

    The bs "slots" are equal shares of `conv | ssm | …`, not tokens. Where the page has no room to round bs shares up,
    the largest divisor of bs that fits is taken; the transfer then reads the group as compressed, which one run is.
    Raises RuleRejected(PAGE_TOO_LARGE) if even one share, the page itself, does not fit.
    """
    content, room = layer.owned.stop - layer.owned.start, room_bytes(layer)
    block_size = layer.spec.block_size
    for slots in (block_size // parts for parts in range(1, block_size + 1) if block_size % parts == 0):
        width = width_bytes(content, slots, room)
        if width is not None:
            return Edit(opaque_page(layer, layout, torch.int8, slots, width))
    raise reject(Reason.PAGE_TOO_LARGE, content_bytes=content, room_bytes=room)


MAMBA_PAGE_VIEW = Rule("mamba-page-view", "list of states in one padded page → one page view", matches, apply)
