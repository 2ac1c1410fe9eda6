"""A group without blocks: no block id ever reaches its layers, but the transfer still reads their slots and widths."""

import torch

from stages.model import Layer, Layout
from stages.pages import opaque_page
from stages.rules.rule import Edit, Rule


def matches(layer: Layer, layout: Layout) -> bool:
    """A layer of no blocks, whatever it stores."""
    return layer.owned.num_blocks == 0


def apply(layer: Layer, layout: Layout) -> Edit:
    """`[0, …] -> [0, slots, 1, w]`, heads first `[0, 1, slots, w]`, int8: the spec's page, of which there is none in memory."""
    slots = layer.spec.block_size if layer.spec.recurrent else layer.spec.slots_per_block
    return Edit(opaque_page(layer, layout, torch.int8, slots, -(-layer.spec.page_size_bytes // slots)))


NO_BLOCKS_VIEW = Rule("no-blocks-view", "a group of no blocks → a page of the spec's size", matches, apply)
