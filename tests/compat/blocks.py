"""The judge of a plan by bytes: which bytes of the engine's memory it would move for a block, against the engine's own rows."""

import torch

from stages.model import EditedLayer, Plan

OTHER, MINE = 0x55, 0xAA


def check_blocks(plan: Plan) -> int:
    """The bytes of the first, second and last block of every layer that the plan moves.

    Each block's rows are marked through the raw tensors' own indices, every other row of its group with another mark: the
    plan's bytes for that block must hold all of the first and none of the second. Memory the group does not own is free.
    """
    checked = 0
    for edited in plan.layers:
        group = [other for other in plan.layers if other.layer.group == edited.layer.group]
        for block in sorted({0, 1, edited.layer.owned.num_blocks - 1}):
            memory = _memory(edited)
            memory.zero_()
            for other in group:
                for rows in _rows(other, None):
                    _mark(rows, OTHER)
            rows = _rows(edited, block)
            for part in rows:
                _mark(part, MINE)
            moved = torch.cat([memory[start:stop] for start, stop in _planned(edited, block)])
            size = sum(part.numel() * part.element_size() for part in rows)
            assert (int(moved.eq(MINE).sum()), int(moved.eq(OTHER).sum())) == (size, 0), (edited.layer.name, block, size, moved.numel())
            checked += size
    return checked


def _planned(edited: EditedLayer, block: int) -> list[tuple[int, int]]:
    shift = block * edited.page.planned.stride_bytes
    return [(run.start + shift, run.stop + shift) for run in edited.page.planned.runs]


def _rows(edited: EditedLayer, block: int | None) -> list[torch.Tensor]:
    """The rows of one block (of all, if None) of each raw tensor; K/V-first tensors count blocks in dim 1."""
    rows = []
    for part in edited.layer.cache.tensors:
        tensor = part.tensor
        dim = 1 if tensor.ndim == 5 and tensor.shape[0] == 2 else 0
        count = tensor.shape[dim] // edited.layer.owned.num_blocks
        rows.append(tensor if block is None else tensor.narrow(dim, block * count, count))
    return rows


def _mark(rows: torch.Tensor, mark: int) -> None:
    rows.copy_(torch.full((rows.element_size(),), mark, dtype=torch.uint8).view(rows.dtype).expand(rows.shape))


def _memory(edited: EditedLayer) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(edited.layer.raw.untyped_storage())
