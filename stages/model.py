"""Every value that flows through a registration, frozen; each arrow of the pipeline has a type of its own.

    Offer → validate → Validated → edit → Edited → engine groups → Plan → transfer → Receipt

Shape letters: NB blocks, P kernel pages, BS tokens per block, H heads, D head size, C content, W synthetic width.
Strides and offsets of tensors are in elements of their dtype; names that end in `_bytes` are bytes, in `_tokens` tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from typing import NamedTuple

import torch


class Kind(StrEnum):
    """What a layer keeps per block; the engine's own names."""

    FULL_ATTENTION = "full_attention"
    MLA_ATTENTION = "mla_attention"
    SLIDING_WINDOW = "sliding_window"
    SLIDING_WINDOW_MLA = "sliding_window_mla"
    MAMBA = "mamba"
    CHUNKED_LOCAL_ATTENTION = "chunked_local_attention"
    SINK_FULL_ATTENTION = "sink_full_attention"
    ENCODER_ONLY_ATTENTION = "encoder_only_attention"
    CROSS_ATTENTION = "cross_attention"
    UNKNOWN = "unknown"


MLA_KINDS = frozenset({Kind.MLA_ATTENTION, Kind.SLIDING_WINDOW_MLA})
WINDOW_KINDS = frozenset({Kind.SLIDING_WINDOW, Kind.SLIDING_WINDOW_MLA})


class Layout(StrEnum):
    """The order of a page's dims in memory, by the engine's own name for it: L layers, B blocks, H heads, N slots, C content."""

    NHD = "NHD"
    HND = "HND"
    LBNHC = "LBNHC"
    LBHNC = "LBHNC"
    BLNHC = "BLNHC"
    BLHNC = "BLHNC"
    LHBNC = "LHBNC"
    BHLNC = "BHLNC"

    @property
    def heads_first(self) -> bool:
        """Whether heads come before slots inside a page."""
        return self in {Layout.HND, Layout.LBHNC, Layout.BLHNC, Layout.LHBNC, Layout.BHLNC}

    @property
    def scattered(self) -> bool:
        """Whether heads lie outside blocks, so that a block of one layer is one run per head."""
        return self in {Layout.LHBNC, Layout.BHLNC}


# ------------------------------------------------------------------------------------------------------- what is offered


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """The engine's spec of one layer; never that of a group wrapper, whose page size is a sum over layers."""

    kind: Kind
    block_size: int
    page_size_bytes: int
    num_states: int
    unpadded_page_size_bytes: int | None = None
    tokens_per_state: Fraction = Fraction(1)
    sliding_window_tokens: int | None = None
    mamba_cache_mode: str | None = None
    prefix_cacheable: bool = True
    dcp_sharded: bool | None = None
    described: Mapping[str, object] = field(default_factory=dict, hash=False)
    """What no stage decides by (class name, heads, dtype, state shapes, …), kept so that a snapshot shows it."""

    @property
    def recurrent(self) -> bool:
        """Whether a block holds recurrent state instead of one entry per token."""
        return self.kind is Kind.MAMBA

    @property
    def slots_per_block(self) -> int:
        """Slots the transfer must read in a block: stored states, but never more than one per token."""
        return min(self.num_states, self.block_size)

    @property
    def window_tokens(self) -> int:
        """Tokens a reuse of this cache looks back: the window, one block of recurrent state, -1 for all."""
        if self.recurrent:
            return self.block_size
        return self.sliding_window_tokens if self.kind in WINDOW_KINDS and self.sliding_window_tokens is not None else -1

    def tokens_per_block(self, dcp_size: int) -> int:
        """Tokens one block id stands for in the scheduler, over all decode-context-parallel ranks."""
        return self.block_size * (1 if self.recurrent or self.dcp_sharded is False else dcp_size)


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One registered tensor and the storage it is cut from; equal `storage` means the same memory."""

    tensor: torch.Tensor = field(repr=False)  # printing a tensor reads its bytes, and asyncio prints results
    storage: str
    storage_size_bytes: int


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What the engine registered for one layer: a tensor, or (`listed`) a list of the states of one page."""

    tensors: tuple[CacheTensor, ...]
    listed: bool = False


@dataclass(frozen=True, slots=True)
class OfferedGroup:
    """One KV cache group of the engine: the layers that share a block id space."""

    layer_names: tuple[str, ...]
    num_blocks: int
    specs: Mapping[str, LeafSpec]
    block_size: int | None = None
    transferable: bool = True
    host_resident: bool = False
    leaf_specs: tuple[LeafSpec, ...] = field(init=False, repr=False, compare=False)
    """The specs of its layers, each object once: the engine gives most layers of a group the same one."""

    def __post_init__(self) -> None:
        specs = list(map(self.specs.get, self.layer_names))
        once = dict(zip(map(id, specs), specs, strict=True)).values()
        object.__setattr__(self, "leaf_specs", tuple(spec for spec in once if spec is not None))


@dataclass(frozen=True, slots=True)
class Worker:
    """Which worker of how many offers its caches."""

    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine that offers, for logs and snapshots; no stage decides by it."""

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class Offer:
    """What one worker hands over for registration; `caches` keeps the registration order."""

    engine: Engine
    groups: tuple[OfferedGroup, ...]
    caches: Mapping[str, LayerCache]
    layout: str | None = None
    """The engine's own name for its layout; None if it did not say."""
    dcp_size: int = 1
    chunk_size_tokens: int | None = None
    """LMCache's chunk size; None if it is not known yet."""
    model_name: str = ""
    worker: Worker = Worker()


# ------------------------------------------------------------------------------------------------------ what is validated


class Exclusion(StrEnum):
    """Why a layer is left out of the transfer."""

    SCRATCH = "scratch"
    SHARED = "shared"
    NOT_TRANSFERABLE = "not_transferable"


@dataclass(frozen=True, slots=True)
class ExcludedLayer:
    """A layer that is not transferred; `group` is None for a cache that only aliases its owner's."""

    name: str
    group: int | None
    exclusion: Exclusion


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes `[start, stop)` of a storage."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """The bytes of every block of a layer: block `b` is `runs` shifted by `b * stride_bytes`. Runs are sorted and apart."""

    runs: tuple[Run, ...]
    stride_bytes: int
    num_blocks: int
    extent: Run = field(init=False, repr=False, compare=False)
    """From the first byte of the first block to the last of the last."""

    def __post_init__(self) -> None:
        end = self.stop + max(self.num_blocks - 1, 0) * self.stride_bytes
        object.__setattr__(self, "extent", Run(self.start, end))

    def moved(self, by_bytes: int) -> "BlockRuns":
        """The same blocks further on."""
        if by_bytes == 0:
            return self
        return BlockRuns(tuple(Run(run.start + by_bytes, run.stop + by_bytes) for run in self.runs), self.stride_bytes, self.num_blocks)

    @property
    def size_bytes(self) -> int:
        """Bytes of one block."""
        return sum(run.stop - run.start for run in self.runs)

    @property
    def start(self) -> int:
        """First byte of block 0."""
        return self.runs[0].start if self.runs else 0

    @property
    def stop(self) -> int:
        """End of the last byte of block 0."""
        return self.runs[-1].stop if self.runs else 0


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """All that layers share which differ only in where they begin: one object for all of them, equal to itself alone.

    Shape, stride and dtype of their tensors are the same, and so is what follows from them and their spec.
    """

    spec: LeafSpec
    block_dim: int
    pages_per_block: int
    owned: BlockRuns
    """What each block owns as the *raw* tensors say, counted from where a layer begins."""
    reach_bytes: int
    """From where a layer begins to the end of what a proven transfer may touch: of its last page, all padding included."""
    tokens_per_block: int


class Layer(NamedTuple):
    """A layer to be transferred, with the bytes each block owns; no rule has touched it.

    A tuple, because there is one for every layer: freezing a dataclass's fields costs several times as much.
    """

    name: str
    cache: LayerCache
    group: int
    geometry: Geometry
    begin_bytes: int
    """Where in its storage the layer begins: the first byte of its first tensor."""

    @property
    def spec(self) -> LeafSpec:
        """The layer's own spec."""
        return self.geometry.spec

    @property
    def block_dim(self) -> int:
        """Which dim of its tensors counts blocks."""
        return self.geometry.block_dim

    @property
    def pages_per_block(self) -> int:
        """Kernel pages of one block."""
        return self.geometry.pages_per_block

    @property
    def tokens_per_block(self) -> int:
        """Tokens one block id stands for."""
        return self.geometry.tokens_per_block

    @property
    def owned(self) -> BlockRuns:
        """The bytes of its storage that each block owns."""
        return self.geometry.owned.moved(self.begin_bytes)

    @property
    def raw(self) -> torch.Tensor:
        """The registered tensor; for a list, its first state."""
        return self.cache.tensors[0].tensor

    @property
    def storage_size_bytes(self) -> int:
        """Size of the storage the layer is cut from."""
        return self.cache.tensors[0].storage_size_bytes


@dataclass(frozen=True, slots=True)
class Validated:
    """An offer every check has passed: the layers to transfer and those left out, in registration order."""

    offer: Offer
    layout: Layout
    layers: tuple[Layer, ...]
    excluded: tuple[ExcludedLayer, ...]


# --------------------------------------------------------------------------------------------------------- what is edited


class PageFormat(StrEnum):
    """How a transfer kernel addresses one layer's pages; LMCache's names. NL layers, NB blocks, BS slots, HS and CS widths."""

    MLA = "NL_X_NB_BS_HS"
    MLA_INDEXER = "NL_X_NB_BSV_BSS"
    NHD = "NL_X_NB_BS_NH_CS"
    HND = "NL_X_NB_NH_BS_CS"
    KV_FIRST_NHD = "NL_X_TWO_NB_BS_NH_HS"
    KV_FIRST_HND = "NL_X_TWO_NB_NH_BS_HS"
    BLOCK_FIRST_NHD = "NL_X_NB_TWO_BS_NH_HS"
    BLOCK_FIRST_HND = "NL_X_NB_TWO_NH_BS_HS"


@dataclass(frozen=True, slots=True)
class TransferPage:
    """What the transfer reads from one view: the bytes it copies for a block, and the identity it groups layers by.

    Layers of one engine group whose `identity` is equal are copied by one kernel with ONE block stride.
    """

    format: PageFormat
    dtype: torch.dtype
    planes: int
    heads: int
    width: int
    slots: int
    planned: BlockRuns

    @property
    def identity(self) -> tuple[PageFormat, torch.dtype, int, int, int, int]:
        """What the transfer groups layers by; the block stride is not in it, so equal identities must have equal strides."""
        return (self.format, self.dtype, self.planes, self.heads, self.width, self.slots)

    def moved(self, by_bytes: int) -> "TransferPage":
        """The same reading of a view that starts further on."""
        return replace(self, planned=self.planned.moved(by_bytes))


@dataclass(frozen=True, slots=True, eq=False)
class Paging:
    """A view that was proven, but for where it begins: one object for all layers it is proven for, equal to itself alone."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin_bytes: int
    """The view's first byte, counted from where a layer begins."""
    page: TransferPage
    """Its `planned` counts from where a layer begins, too."""
    block_dim: int
    rule: str | None = None
    opaque: bool = False
    """The view's inner dims are addressing only: valid for byte transport, not for reading heads or tokens."""


class EditedLayer(NamedTuple):
    """A layer as it will be registered: `view` is the raw tensor itself where no rule was needed. A tuple, as `Layer` is."""

    layer: Layer
    view: torch.Tensor
    paging: Paging

    def __repr__(self) -> str:
        return f"EditedLayer(layer={self.layer!r}, paging={self.paging!r})"  # as above: printing a tensor reads its bytes

    @property
    def page(self) -> TransferPage:
        """What the transfer reads from the view, in bytes of the layer's storage."""
        return self.paging.page.moved(self.layer.begin_bytes)

    @property
    def block_dim(self) -> int:
        """Which dim of the view counts blocks."""
        return self.paging.block_dim

    @property
    def rule(self) -> str | None:
        """The rule that made the view."""
        return self.paging.rule

    @property
    def opaque(self) -> bool:
        """Whether the view's inner dims are addressing only."""
        return self.paging.opaque


@dataclass(frozen=True, slots=True)
class AlikeLayers:
    """Layers of one group that are read the same way and differ only in where they begin."""

    group: int
    paging: Paging
    indices: tuple[int, ...]
    """Positions in `Edited.layers`, rising."""


@dataclass(frozen=True, slots=True)
class Edited:
    """Every layer re-paged to block granularity and proven."""

    offer: Offer
    layout: Layout
    layers: tuple[EditedLayer, ...]
    excluded: tuple[ExcludedLayer, ...]
    alike: tuple[AlikeLayers, ...]
    """Every layer once, by the order of their first ones."""
    applied: Mapping[tuple[int, str], tuple[str, ...]]
    """Which rule edited which layers of which group: names by group and rule."""


# ----------------------------------------------------------------------------------------------- what is planned and kept


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Layers of one engine group that one transfer kernel copies; the first six fields are LMCache's `EngineGroupInfo`."""

    engine_group_id: int
    layer_indices: tuple[int, ...]
    """Positions in `Plan.layers`."""
    tokens_per_block: int
    sw_size_tokens: int
    extra_object_group_tag: int
    recurrent_state: bool
    layer_names: tuple[str, ...]
    slots_per_block: int
    block_bytes: int
    block_stride_bytes: int
    num_blocks: int
    opaque: bool
    layout_fingerprint: str
    """Changes when the order of bytes inside a page changes; entries are shareable only between equal fingerprints."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A proven registration, ready to send, and to send again after a server restart."""

    offer: Offer
    layout: Layout
    layers: tuple[EditedLayer, ...]
    groups: tuple[EngineGroup, ...]
    excluded: tuple[ExcludedLayer, ...]

    @property
    def registered_bytes(self) -> int:
        """Bytes of all blocks of all layers that a transfer may touch."""
        return sum(group.block_bytes * group.num_blocks * len(group.layer_indices) for group in self.groups)


@dataclass(frozen=True, slots=True)
class Receipt:
    """Proof that a backend holds a plan; exists only after the backend said so."""

    plan: Plan
    backend: str
    registration: str
    """The backend's own name for this registration."""
