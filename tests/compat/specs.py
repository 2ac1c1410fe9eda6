"""Every spec class of the vLLM that imports here, built from its fields with small numbers, and what kvreg must make of it.

A class or a required field that has appeared since fails the tests by its name: give it a row here.
"""

from dataclasses import MISSING, dataclass, fields
from types import ModuleType
from typing import Any

import torch

from stages.errors import Reason
from stages.model import Kind

BLOCK_SIZE = 96
KERNEL_BLOCK_SIZE = 32
NUM_BLOCKS = 5
STATE_SHAPES, STATE_DTYPES = ((3, 100), (2, 16, 16)), (torch.bfloat16, torch.float32)
STATE_BYTES = 3 * 100 * 2 + 2 * 16 * 16 * 4

FIELDS: dict[str, object] = {
    "block_size": BLOCK_SIZE,
    "num_kv_heads": 2,
    "head_size": 32,
    "dtype": torch.bfloat16,
    "sliding_window": 200,
    "attention_chunk_size": 192,
    "rswa_window": 64,
    "shapes": STATE_SHAPES,
    "dtypes": STATE_DTYPES,
    "page_size": 4096,
    "blocks_per_request": 2,
}
"""A value for each field that some class requires."""

CLASS_FIELDS: dict[str, dict[str, object]] = {
    "MLAAttentionSpec": {"num_kv_heads": 1, "head_size": 72},
    "HiddenStateCacheSpec": {"num_kv_heads": 1, "head_size": 72},
    "SlidingWindowMLASpec": {"num_kv_heads": 1, "head_size": 72},
    "TQFullAttentionSpec": {"dtype": torch.int8, "tq_slot_size": 70},
    "MambaSpec": {"mamba_cache_mode": "align"},
}
"""What a class needs to be itself."""


@dataclass(frozen=True)
class Expected:
    """What kvreg must make of a class: its kind, and why it is refused or left out, if it is."""

    kind: Kind
    refused: Reason | None = None
    scratch: bool = False


EXPECTED = {
    "FullAttentionSpec": Expected(Kind.FULL_ATTENTION),
    "TQFullAttentionSpec": Expected(Kind.FULL_ATTENTION),
    "RSWASpec": Expected(Kind.FULL_ATTENTION),
    "MLAAttentionSpec": Expected(Kind.MLA_ATTENTION),
    "HiddenStateCacheSpec": Expected(Kind.MLA_ATTENTION),
    "SlidingWindowSpec": Expected(Kind.SLIDING_WINDOW),
    "SlidingWindowMLASpec": Expected(Kind.SLIDING_WINDOW_MLA),
    "ChunkedLocalAttentionSpec": Expected(Kind.CHUNKED_LOCAL_ATTENTION),
    "SinkFullAttentionSpec": Expected(Kind.SINK_FULL_ATTENTION),
    "MambaSpec": Expected(Kind.MAMBA),
    "EncoderOnlyAttentionSpec": Expected(Kind.ENCODER_ONLY_ATTENTION, refused=Reason.ENCODER_ONLY_ATTENTION),
    "CrossAttentionSpec": Expected(Kind.CROSS_ATTENTION, refused=Reason.CROSS_ATTENTION),
    "KpoolTailSpec": Expected(Kind.SLIDING_WINDOW, scratch=True),
    "CircularBufferSpec": Expected(Kind.UNKNOWN, scratch=True),
    "HiSparseHotSpec": Expected(Kind.UNKNOWN, scratch=True),
    "HiSparseResidentSpec": Expected(Kind.UNKNOWN, scratch=True),
}

_NOT_LEAVES = {"AttentionSpec", "UniformTypeKVCacheSpecs"}


def spec_classes(interface: ModuleType) -> dict[str, type]:
    """Every class of a leaf spec, by name."""
    classes: dict[str, type] = {}
    waiting = [interface.KVCacheSpec]
    while waiting:
        below = waiting.pop().__subclasses__()
        waiting += below
        classes |= {cls.__name__: cls for cls in below if cls.__name__ not in _NOT_LEAVES}
    return classes


def build(cls: type, **changes: object) -> Any:
    """A spec of this class: every required field from the tables above, and `changes`."""
    given = CLASS_FIELDS.get(cls.__name__, {}) | changes
    required = [f.name for f in fields(cls) if f.init and f.default is MISSING and f.default_factory is MISSING]
    unknown = [name for name in required if name not in FIELDS and name not in given]
    assert not unknown, f"{cls.__name__} requires fields that FIELDS has no value for: {unknown}"
    return cls(**{name: FIELDS[name] for name in required if name not in given} | given)
