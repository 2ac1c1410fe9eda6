"""engine-group-info: proven layers grouped as LMCache groups them, in its order and with its fields.

One group is the layers of one engine group that one transfer kernel copies: equal transfer identity, which the edit
stage has made imply an equal block stride. Groups come in the order of their first layer; engine group ids stay the
engine's own, so a pipeline-parallel rank that holds no layer of a group just has no entry for it.
"""

import hashlib

import torch

from stages.model import AlikeLayers, Edited, EditedLayer, EngineGroup, Plan


def engine_groups(edited: Edited) -> Plan:
    """The plan: tensors in registration order and the groups that refer to them by position."""
    copied_alike: dict[object, list[AlikeLayers]] = {}
    for alike in edited.alike:
        copied_alike.setdefault((alike.group, alike.paging.page.identity), []).append(alike)
    groups = tuple(_group(edited, members) for members in copied_alike.values())
    return Plan(edited.offer, edited.layout, edited.layers, groups, edited.excluded)


def _group(edited: Edited, members: list[AlikeLayers]) -> EngineGroup:
    indices = sorted(index for alike in members for index in alike.indices)
    layers = [edited.layers[index] for index in indices]
    first, page = layers[0], layers[0].paging.page
    orders = {alike.paging: repr(_byte_order(edited.layers[alike.indices[0]])) for alike in members}
    return EngineGroup(
        engine_group_id=first.layer.group,
        layer_indices=tuple(indices),
        tokens_per_block=first.layer.tokens_per_block,
        sw_size_tokens=first.layer.spec.window_tokens,
        # LMCache's auxiliary page pools live in engine groups after the engine's own, and are tagged 1, 2, …
        extra_object_group_tag=max(first.layer.group - len(edited.offer.groups) + 1, 0),
        recurrent_state=first.layer.spec.recurrent,
        layer_names=tuple(layer.layer.name for layer in layers),
        slots_per_block=page.slots,
        block_bytes=page.planned.size_bytes,
        block_stride_bytes=page.planned.stride_bytes,
        num_blocks=page.planned.num_blocks,
        opaque=any(alike.paging.opaque for alike in members),
        layout_fingerprint=hashlib.sha256(f"[{', '.join(orders[layer.paging] for layer in layers)}]".encode()).hexdigest()[:16],
    )


def _byte_order(layer: EditedLayer) -> tuple[object, ...]:
    """What fixes the order of bytes inside a page and its stored copy: how the transfer reads it, and what lies where in it.

    An opaque page is laid out as its raw tensors with their kernel paging are, any other as its view is.
    """
    tensors = [part.tensor for part in layer.layer.cache.tensors] if layer.opaque else [layer.view]
    pages = layer.layer.pages_per_block if layer.opaque else 1
    block_dim = layer.layer.block_dim if layer.opaque else layer.block_dim
    inner = [_inner_order(tensor, block_dim, layer.layer.owned.start) for tensor in tensors]
    page = layer.paging.page
    return (layer.layer.spec.kind, page.planned.size_bytes, page.identity, pages, inner)


def _inner_order(tensor: torch.Tensor, block_dim: int, page_start: int) -> tuple[object, ...]:
    """A tensor's first byte in its page, and the dims inside. How far K and V planes lie apart tells only how many blocks there are."""
    dims = [(tensor.shape[dim], tensor.stride(dim)) for dim in range(tensor.ndim) if dim != block_dim and tensor.shape[dim] > 1]
    step = tensor.stride(block_dim)
    return (
        str(tensor.dtype),
        tensor.storage_offset() * tensor.element_size() - page_start,
        [(size, stride if stride < step else "plane") for size, stride in dims],
    )
