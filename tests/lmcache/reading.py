"""A plan through LMCache's own functions, without a server: what it reads from our views, and what its kernels copy.

Imports LMCache, which takes seconds: tests import this module only when they run.
"""

from collections.abc import Sequence
from math import lcm
from typing import Any

import torch
from lmcache.lmcache_native import TransferDirection, is_mla
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.kv_format import get_spec
from lmcache.v1.gpu_connector.utils import normalize_and_discover_per_layer_formats
from lmcache.v1.kv_layer_groups import KVLayerGroupsManager
from lmcache.v1.multiprocess.group_view import EngineGroupInfo, engine_group_layer_indices
from lmcache.v1.platform.torch_ops.mp_mem_kernels import multi_layer_block_kv_transfer

from stages.model import EngineGroup, Layout, Plan

HINTS = {Layout.LBNHC: "NHD", Layout.LBHNC: "HND"}
"""The layouts that LMCache knows by another name."""


class Served:
    """Views and group infos as LMCache's server takes them in: sorted tensors, their formats, and its kernel groups."""

    def __init__(self, names: Sequence[str], views: Sequence[Any], infos: Sequence[EngineGroupInfo], hints: dict[str, Any]) -> None:
        self.names = names
        self.tensors, self.formats = normalize_and_discover_per_layer_formats(
            list(views), engine_group_layer_indices(infos), EngineType.VLLM, hints
        )
        chunk = lcm(*(info.tokens_per_block for info in infos))
        self.groups = KVLayerGroupsManager(self.tensors, self.formats, list(infos), chunk).kernel_groups

    def addressed(self, name: str, block: int) -> list[tuple[int, int]] | None:
        """The bytes `[start, stop)` of its storage that LMCache's kernel copies for a block of a layer; None if it is in no group."""
        index = self.names.index(name)
        group = next((group for group in self.groups if index in group.layer_indices), None)
        if group is None:
            return None
        tensor, shape, item = self.tensors[index], group.shape_desc, group.shape_desc.element_size
        first = tensor.storage_offset() * tensor.element_size()
        plane = shape.bs * shape.nh * shape.hs * item
        if group.engine_kv_format.name.startswith("NL_X_TWO_NB"):
            return [(start, start + plane) for start in (first + block * plane, first + (shape.nb + block) * plane)]
        start = first + block * stride_bytes(group)
        return [(start, start + shape.kv_size * plane)]


def stride_bytes(group: Any) -> int:
    """The step from block to block. Formats that know no padding leave it out; their kernels step by a tight block."""
    shape = group.shape_desc
    planes_inside = 2 if group.engine_kv_format.name.startswith("NL_X_NB_TWO") else 1
    return int((shape.block_stride_elems or shape.bs * shape.nh * shape.hs * planes_inside) * shape.element_size)


class Reading(Served):
    """A plan as LMCache's server takes it in."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        hints = {"kv_layout": HINTS.get(plan.layout, str(plan.layout))}
        names, views = [layer.layer.name for layer in plan.layers], [layer.view for layer in plan.layers]
        super().__init__(names, views, [_info(group) for group in plan.groups], hints)

    def check(self) -> None:
        """Assert that formats, slots, widths, strides, groups and their order are the plan's."""
        for layer, tensor, page_format in zip(self.plan.layers, self.tensors, self.formats, strict=True):
            page, spec = layer.page, get_spec([tensor], page_format)
            heads = 1 if is_mla(page_format) else spec.num_heads()
            theirs = (page_format.name, spec.kv_size(), heads, spec.head_size(), spec.block_size(), spec.num_blocks(), spec.dtype())
            ours = (page.format.value, page.planes, page.heads, page.width, page.slots, page.planned.num_blocks, page.dtype)
            assert theirs == ours, layer.layer.name
        assert [tuple(group.layer_indices) for group in self.groups] == [group.layer_indices for group in self.plan.groups]
        for theirs, ours in zip(self.groups, self.plan.groups, strict=True):
            shape = theirs.shape_desc
            assert (theirs.engine_group_idx, shape.nb) == (ours.engine_group_id, ours.num_blocks)
            assert (theirs.slots_per_block, theirs.tokens_per_block) == (ours.slots_per_block, ours.tokens_per_block)
            assert shape.kv_size * shape.bs * shape.nh * shape.hs * shape.element_size == ours.block_bytes
            assert stride_bytes(theirs) == ours.block_stride_bytes

    def move(self, group: int, source: int, target: int) -> None:
        """Store one block of a group by LMCache's copy code, and retrieve it into another block."""
        kernel_group = self.groups[group]
        shape, page_format = kernel_group.shape_desc, kernel_group.engine_kv_format
        columns = shape.hs if is_mla(page_format) else shape.nh * shape.hs
        planes = (2,) if shape.kv_size == 2 else ()
        # Integers of the same width: torch's CPU kernels do not index every float8.
        same_width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[kernel_group.dtype.itemsize]
        held = [torch.zeros((*planes, shape.nl, shape.bs, columns), dtype=same_width)]
        tensors = [self.tensors[index].view(same_width) for index in kernel_group.layer_indices]
        for block, direction in ((source, TransferDirection.D2H), (target, TransferDirection.H2D)):
            _transfer(tensors, held, torch.tensor([block]), "cpu", direction, shape, shape.bs, page_format, 0)


def _info(group: EngineGroup) -> EngineGroupInfo:
    return EngineGroupInfo(
        group.engine_group_id,
        group.layer_indices,
        group.tokens_per_block,
        group.sw_size_tokens,
        group.extra_object_group_tag,
        group.recurrent_state,
    )


def _transfer(tensors: Sequence[torch.Tensor], held: Sequence[torch.Tensor], *rest: Any) -> None:
    multi_layer_block_kv_transfer(tensors, held, *rest)
