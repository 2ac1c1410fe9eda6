"""Workers as an engine allocates them, drawn at random: the layers, and by construction which rows are whose blocks.

Sizes are tiny so that every byte of every block can be judged. `served()` draws what must be accepted, one function for
each way that engines have allocated KV caches; `arbitrary()` draws nonsense, which must be refused or be right.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import prod

import torch
from hypothesis import strategies as st

from stages.model import CacheTensor, Engine, Kind, LayerCache, LeafSpec, Offer, OfferedGroup

ATTENTION_KINDS = (Kind.FULL_ATTENTION, Kind.SLIDING_WINDOW, Kind.CHUNKED_LOCAL_ATTENTION, Kind.SINK_FULL_ATTENTION)
DTYPES = (torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
BLOCK_COUNTS = (0, 1, 1, 2, 2, 3, 5, 8)


@dataclass(frozen=True)
class Cut:
    """One tensor cut from a storage; offset and strides in elements."""

    storage: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Laid:
    """A layer as laid in memory. `cuts[i]` counts blocks, `pages` rows each, along `block_dim`."""

    name: str
    spec: LeafSpec
    cuts: tuple[Cut, ...]
    block_dim: int = 0
    pages: int = 1
    listed: bool = False


@dataclass(frozen=True)
class World:
    """One worker: groups of layer names, the layers in registration order, and the size of each storage."""

    groups: tuple[OfferedGroup, ...]
    layers: tuple[Laid, ...]
    storage_bytes: Mapping[str, int]
    layout: str | None = "NHD"
    dcp_size: int = 1
    pools: Mapping[str, int] = field(default_factory=dict)
    """The blocks of each auxiliary pool, which is in no group of the engine."""
    chunk_size_tokens: int | None = None

    def offer(self, device: str = "meta") -> Offer:
        """The offer. A storage is as long as it says, but for tensors that run past it: those can be made only in a longer one."""
        ends = dict(self.storage_bytes)
        for laid in self.layers:
            for cut in laid.cuts:
                last = cut.offset + sum(max(size - 1, 0) * step for size, step in zip(cut.shape, cut.stride, strict=True))
                ends[cut.storage] = max(ends[cut.storage], (last + (0 not in cut.shape)) * cut.dtype.itemsize)
        memory = {key: torch.zeros(end, dtype=torch.uint8, device=device).untyped_storage() for key, end in ends.items()}

        def tensor(cut: Cut) -> CacheTensor:
            view = torch.empty(0, dtype=cut.dtype, device=device).set_(memory[cut.storage], cut.offset, cut.shape, cut.stride)
            return CacheTensor(view, cut.storage, self.storage_bytes[cut.storage])

        caches = {laid.name: LayerCache(tuple(map(tensor, laid.cuts)), laid.listed) for laid in self.layers}
        return Offer(Engine("test", "0"), self.groups, caches, self.layout, self.dcp_size, self.chunk_size_tokens, "world")


# ------------------------------------------------------------------------------------------------------------- one page


@dataclass(frozen=True)
class Page:
    """One kernel page: sizes by dim name, the logical order of dims, and their order in memory, outermost first.

    B counts pages, K is K and V, H heads, N slots, C or D content.
    """

    dtype: torch.dtype
    sizes: Mapping[str, int]
    logical: str
    memory: str
    pages: int = 1
    head_step: int | None = None
    """The stride of a head dim of size 1, where the engine gave it one of its own."""

    @property
    def content_bytes(self) -> int:
        """Bytes of a whole block, without padding."""
        return self.pages * prod(self.sizes.values()) * self.dtype.itemsize

    @property
    def states(self) -> int:
        """Slots of a whole block."""
        return self.pages * self.sizes["N"]

    def cut(self, storage: str, start: int, step: int, num_blocks: int) -> Cut:
        """`num_blocks` blocks from byte `start`, one every `step` bytes."""
        item = self.dtype.itemsize
        sizes = {**self.sizes, "B": num_blocks * self.pages}
        strides, run = {"B": step // self.pages // item}, 1
        for dim in reversed(self.memory):
            strides[dim] = run
            run *= sizes[dim]
        if self.head_step is not None:
            strides["H"] = self.head_step
        return Cut(
            storage, self.dtype, tuple(sizes[dim] for dim in self.logical), tuple(strides[dim] for dim in self.logical), start // item
        )


@st.composite
def attention_pages(draw: st.DrawFn, heads_first: bool, forms: tuple[str, ...], pages: tuple[int, ...] = (1, 2, 3, 5)) -> Page:
    """K and V of some heads: `[B,H,N,C]`, `[B,2,N,H,D]`, or `[2,B,N,H,D]` in blocks-first or K/V-first memory."""
    sizes = {"N": draw(st.sampled_from((1, 2, 4, 6))), "H": draw(st.integers(1, 3)), "C": draw(st.sampled_from((4, 6, 8)))}
    form = draw(st.sampled_from(forms))
    inner = "HNC" if heads_first else "NHC"
    dtype = draw(st.sampled_from(DTYPES))
    if form == "BHNC":
        return Page(dtype, sizes, "BHNC", inner, draw(st.sampled_from(pages)))
    sizes["K"] = 2
    logical = "BKNHC" if form == "BK" else "KBNHC"
    memory = "KB" + inner if form == "KB" else "K" + inner
    return Page(dtype, sizes, logical, memory, draw(st.sampled_from(pages)))


@st.composite
def latent_pages(draw: st.DrawFn, heads_first: bool, rank: int, pages: tuple[int, ...] = (1, 2, 3, 5)) -> Page:
    """One latent (or indexer, or compressed) head: `[B,N,C]` or `[B,1,N,C]`, the head's stride natural or arbitrary."""
    indexer = draw(st.booleans())
    dtype = torch.uint8 if indexer else draw(st.sampled_from(DTYPES))
    sizes = {"N": draw(st.sampled_from((1, 2, 4, 6))), "C": 132 if indexer else draw(st.sampled_from((4, 6, 8)))}
    count = draw(st.sampled_from(pages))
    if rank == 3:
        return Page(dtype, sizes, "BNC", "NC", count)
    natural = sizes["N"] * sizes["C"] if heads_first else sizes["C"]
    step = draw(st.sampled_from((natural, natural, 1, sizes["C"], sizes["N"] * sizes["C"], 7 * sizes["N"] * sizes["C"])))
    return Page(dtype, {**sizes, "H": 1}, "BHNC", "HNC", count, head_step=step)


@st.composite
def attention_specs(draw: st.DrawFn, page: Page, page_bytes: int, latent: bool) -> LeafSpec:
    """The spec of a page: plain, compressed (several tokens a slot, also 3/2) or fractional (several slots a token)."""
    states = page.states
    ratios = [Fraction(1), Fraction(1), Fraction(2), Fraction(4)]
    ratios += [Fraction(3, 2)] if states % 2 == 0 else []
    # A fraction is served where the page divides by its tokens.
    fractions = [Fraction(1, 4), Fraction(1, 2), Fraction(2, 3)]
    ratios += [
        part for part in fractions if (states * part).denominator == 1 and page.content_bytes % (states * part * page.dtype.itemsize) == 0
    ]
    ratio = draw(st.sampled_from(ratios if page.logical[0] == "B" else ratios[:1]))
    kinds = (Kind.MLA_ATTENTION, Kind.SLIDING_WINDOW_MLA) if latent else ATTENTION_KINDS
    kind = draw(st.sampled_from(kinds))
    window = draw(st.sampled_from((2, 8))) * int(states * ratio) if kind in (Kind.SLIDING_WINDOW, Kind.SLIDING_WINDOW_MLA) else None
    return LeafSpec(
        kind,
        int(states * ratio),
        page_bytes,
        states,
        draw(st.sampled_from((None, page.content_bytes, max(page.content_bytes - 8, 1)))),
        ratio,
        window,
        dcp_sharded=draw(st.sampled_from((None, True, False))),
    )


def state_spec(block_size: int, page_bytes: int, unpadded: int | None, mode: str) -> LeafSpec:
    """The spec of recurrent state."""
    return LeafSpec(Kind.MAMBA, block_size, page_bytes, 1, unpadded, Fraction(-1), mamba_cache_mode=mode)


@st.composite
def listed_states(draw: st.DrawFn, name: str, storage: str, num_blocks: int, page_bytes: int, block_size: int) -> Laid:
    """One to three states in a padded page, a list: any dtypes, gaps between them, inner dims permuted in memory."""
    cuts: list[Cut] = []
    used = 0
    for _ in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from((torch.bfloat16, torch.float32)))
        start = -(-used // 4) * 4 + (draw(st.sampled_from((0, 0, 4))) if cuts else 0)
        room = (page_bytes - start) // dtype.itemsize
        if room < 1:
            break
        rows = draw(st.integers(1, min(3, room)))
        sizes = (rows, draw(st.integers(1, min(6, room // rows))))
        inner = (1, rows) if draw(st.booleans()) else (sizes[1], 1)  # a transposed state lies column by column
        step = page_bytes // dtype.itemsize
        cuts.append(Cut(storage, dtype, (num_blocks, *sizes), (step, *inner), start // dtype.itemsize))
        used = start + prod(sizes) * dtype.itemsize
    held = sum(prod(cut.shape[1:]) * cut.dtype.itemsize for cut in cuts)
    spec = state_spec(block_size, page_bytes, draw(st.sampled_from((None, held))), draw(st.sampled_from(("align", "all"))))
    return Laid(name, spec, tuple(cuts), listed=True)


@st.composite
def unified_states(
    draw: st.DrawFn, name: str, storage: str, start: int, step: int, num_blocks: int, page_bytes: int, block_size: int
) -> Laid:
    """All states of a block in one byte tensor `[NB,1,1,C]`, the page's padding counted in C or not."""
    content = page_bytes if draw(st.booleans()) else draw(st.integers(max(page_bytes // 2, 1), page_bytes))
    odd = draw(st.sampled_from((content, content, 1, 5)))  # dims of size 1 may have any stride
    cut = Cut(storage, torch.int8, (num_blocks, 1, 1, content), (step, content, odd, 1), start)
    mode = draw(st.sampled_from(("align", "all")))
    return Laid(name, state_spec(block_size, page_bytes, draw(st.sampled_from((None, content))), mode), (cut,))


# ---------------------------------------------------------------------------------------------------- what must be served


@st.composite
def storages_of_their_own(draw: st.DrawFn) -> World:
    """vLLM 0.22 to 0.28: one storage for each layer of a group; groups overlay each other from byte 0.

    One page size throughout. Attention is `[B,H,N,C]`, `[B,2,…]`, `[2,B,…]` (blocks-first in memory where it overlays
    state) or latent; state is a list or one int8 tensor.
    """
    heads_first = draw(st.booleans())
    num_blocks = draw(st.sampled_from(BLOCK_COUNTS))
    hybrid = draw(st.booleans())
    latent = draw(st.integers(0, 3)) == 0
    padded = draw(st.booleans())
    pages = (1,) if padded else (1, 2, 3, 5)
    kv_forms = ("BHNC", "BK", "KB-in-blocks") if hybrid or padded else ("BHNC", "BK", "KB")
    page = draw(
        latent_pages(heads_first, draw(st.sampled_from((3, 4))), pages) if latent else attention_pages(heads_first, kv_forms, pages)
    )
    if page.sizes.get("K") and (page.logical[0] == "B" or "B" in page.memory):
        # Two blocks of K and V with dims in memory order: nothing says which dim is which, so they are refused.
        num_blocks = 3 if num_blocks == 2 and page.pages == 1 else num_blocks
    page_bytes = -(-page.content_bytes // 4) * 4 if hybrid else page.content_bytes
    page_bytes += draw(st.sampled_from((4, 32))) if padded else 0
    if page_bytes % page.dtype.itemsize or (page_bytes != page.content_bytes and page.pages > 1):
        page_bytes = page.content_bytes
    if page_bytes % 4:
        hybrid = False
    count = draw(st.integers(1, 3))
    storages = {f"s{index}": num_blocks * page_bytes for index in range(count)}
    layers: list[Laid] = []
    groups: list[OfferedGroup] = []
    for kind in ["state"] * draw(st.integers(1, 2)) * hybrid + ["attention"] * draw(st.integers(1, 2)):
        names = []
        spec = draw(attention_specs(page, page_bytes, latent))
        block_size = draw(st.sampled_from((1, 4, 6, 16)))
        form = draw(st.booleans())
        for index in range(draw(st.integers(1, count))):
            name, storage = f"{len(groups)}.{index}", f"s{index}"
            if kind == "attention":
                cut = page.cut(storage, 0, page_bytes, num_blocks)
                layers.append(Laid(name, spec, (cut,), page.logical.index("B"), page.pages))
            elif form:
                layers.append(draw(listed_states(name, storage, num_blocks, page_bytes, block_size)))
            else:
                layers.append(draw(unified_states(name, storage, 0, page_bytes, num_blocks, page_bytes, block_size)))
            names.append(name)
        groups.append(OfferedGroup(tuple(names), num_blocks, {laid.name: laid.spec for laid in layers if laid.name in names}))
    layout = draw(st.sampled_from(("HND" if heads_first else "NHD", None)))
    tight = {key: max(_end(cut) for laid in layers for cut in laid.cuts if cut.storage == key) for key in used(layers)}
    sizes = tight if draw(st.booleans()) and not hybrid else {key: storages[key] for key in tight}
    return World(tuple(groups), tuple(layers), sizes, layout, draw(st.sampled_from((1, 1, 2))))


@dataclass(frozen=True)
class Member:
    """A layer before it has a place: a page of attention and its spec, or so many bytes of state for so many tokens."""

    page_bytes: int
    page: Page | None = None
    spec: LeafSpec | None = None
    block_size: int = 0


@st.composite
def members(draw: st.DrawFn, heads_first: bool, pages: tuple[int, ...]) -> list[Member]:
    """The layers of one group: state, or attention of mixed pages, where the same page may come twice, padded and not."""
    if draw(st.integers(0, 2)) == 0:
        state = Member(4 * draw(st.integers(4, 40)), block_size=draw(st.sampled_from((4, 6, 16))))
        return [state] * draw(st.integers(1, 2))
    out = []
    for _ in range(draw(st.integers(1, 3))):
        latent = draw(st.booleans())
        page = draw(latent_pages(heads_first, 4, pages) if latent else attention_pages(heads_first, ("BHNC",), pages))
        if page.content_bytes % 4:  # the next layer must be aligned, and kernel pages are never padded
            page = replace(page, pages=1)
        page_bytes = -(-page.content_bytes // 4) * 4
        page_bytes += draw(st.sampled_from((0, 0, 4, 64))) if page.pages == 1 else 0
        spec = draw(attention_specs(page, page_bytes, latent))
        out.append(Member(page_bytes, page, spec))
        if draw(st.booleans()):
            wider = page_bytes + (draw(st.sampled_from((0, 16))) if page.pages == 1 else 0)
            out.append(Member(wider, page, replace(spec, page_size_bytes=wider)))
    return out


@st.composite
def one_allocation(draw: st.DrawFn) -> World:
    """vLLM 0.29 on: every layer is cut from one allocation, layers outermost (LB*) or blocks outermost (BL*).

    Groups overlay each other from the first byte of the caches, each with its own number of blocks. A group may mix pages:
    heads, latents beside indexers, compressed slots, and the same shape with and without padding. The block stride may be
    aligned up; under BL* it spans all layers. The last page may be tight.
    """
    layout = draw(st.sampled_from(("LBNHC", "LBHNC", "BLNHC", "BLHNC")))
    heads_first, blocks_outermost = layout in ("LBHNC", "BLHNC"), layout.startswith("BL")
    block_counts = draw(st.sampled_from(BLOCK_COUNTS)), draw(st.sampled_from(BLOCK_COUNTS))
    drawn = draw(st.lists(members(heads_first, (1,) if blocks_outermost else (1, 1, 2, 3, 5)), min_size=1, max_size=3))
    alignment = draw(st.sampled_from((4, 4, 16, 256)))
    block_bytes = _up(max(sum(member.page_bytes for member in group) for group in drawn), alignment)
    block_bytes += draw(st.sampled_from((0, 0, 4, 128))) if blocks_outermost else 0
    first = draw(st.sampled_from((0, 0, 4, 64)))
    layers: list[Laid] = []
    groups: list[OfferedGroup] = []
    for group in drawn:
        num_blocks = block_counts[draw(st.sampled_from((0, 0, 0, 1)))]
        start, specs = first, dict[str, LeafSpec]()
        for member in group:
            name = f"{len(groups)}.{len(specs)}"
            split = member.page is not None and member.page.pages > 1
            step = block_bytes if blocks_outermost else member.page_bytes if split else _up(member.page_bytes, alignment)
            if member.page is not None and member.spec is not None:
                layers.append(Laid(name, member.spec, (member.page.cut("s", start, step, num_blocks),), pages=member.page.pages))
            else:
                layers.append(draw(unified_states(name, "s", start, step, num_blocks, member.page_bytes, member.block_size)))
            start += member.page_bytes if blocks_outermost else num_blocks * step
            specs[name] = layers[-1].spec
        groups.append(OfferedGroup(tuple(specs), num_blocks, specs))
    named = draw(st.sampled_from((layout, layout, None)))
    tight = max(_end(cut) for laid in layers for cut in laid.cuts)
    size = draw(st.sampled_from((tight, tight + block_bytes)))
    return World(tuple(groups), tuple(layers), {"s": size}, named, draw(st.sampled_from((1, 1, 2))))


def _up(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _end(cut: Cut) -> int:
    """One past the last byte a cut reaches."""
    if 0 in cut.shape:
        return 0
    last = sum((size - 1) * step for size, step in zip(cut.shape, cut.stride, strict=True))
    return (cut.offset + last + 1) * cut.dtype.itemsize


def used(layers: list[Laid]) -> list[str]:
    """The storages that layers are cut from."""
    return list(dict.fromkeys(cut.storage for laid in layers for cut in laid.cuts))


@st.composite
def with_company(draw: st.DrawFn, worlds: st.SearchStrategy[World]) -> World:
    """A world and what comes with real ones: KV sharing, scratch, groups not to be transferred, empty groups, aux pools,
    a group with another number of blocks, and a registration order of its own."""
    world = draw(worlds)
    layers, groups, sizes, pools = list(world.layers), list(world.groups), dict(world.storage_bytes), {}
    for laid in draw(st.lists(st.sampled_from(world.layers), max_size=2)):
        layers.append(replace(laid, name=f"shares.{len(layers)}"))
    if draw(st.booleans()):
        layers.append(_alone("scratch", Kind.UNKNOWN, 3, sizes, prefix_cacheable=False))
        groups.append(OfferedGroup(("scratch",), 3, {"scratch": layers[-1].spec}))
    if draw(st.booleans()):
        layers.append(_alone("kept", Kind.CROSS_ATTENTION, 4, sizes))
        groups.append(OfferedGroup(("kept",), 4, {"kept": layers[-1].spec}, transferable=False))
    if draw(st.booleans()):
        groups.append(OfferedGroup((), 6, {}))
    if draw(st.booleans()):
        layers.append(_alone("more", Kind.FULL_ATTENTION, 9, sizes))
        groups.append(OfferedGroup(("more",), 9, {"more": layers[-1].spec}))
    for tokens, label in draw(st.lists(st.tuples(st.sampled_from((4, 8)), st.sampled_from(("", ".a", ".b"))), max_size=3, unique=True)):
        name = f"cb.aux_pool.{tokens}{label}"
        layers.append(_alone(name, Kind.MLA_ATTENTION, 5, sizes, tokens=tokens))
        pools[name] = 5
    return replace(world, groups=tuple(groups), layers=tuple(draw(st.permutations(layers))), storage_bytes=sizes, pools=pools)


def _alone(name: str, kind: Kind, num_blocks: int, sizes: dict[str, int], prefix_cacheable: bool = True, tokens: int = 4) -> Laid:
    """`[NB, 4, 6]` in a storage of its own."""
    sizes[name] = num_blocks * 24
    spec = LeafSpec(
        kind, tokens, 24, 4, 24, prefix_cacheable=prefix_cacheable, dcp_sharded=False if tokens != 4 or "pool" in name else None
    )
    return Laid(name, spec, (Cut(name, torch.uint8, (num_blocks, 4, 6), (24, 6, 1), 0),))


def served() -> st.SearchStrategy[World]:
    """Workers that must be accepted."""
    return st.one_of(storages_of_their_own(), one_allocation(), with_company(storages_of_their_own()), with_company(one_allocation()))


# ------------------------------------------------------------------------------------------------------------- nonsense


@st.composite
def arbitrary_layers(draw: st.DrawFn, name: str, num_blocks: int) -> Laid:
    """Any rank, memory order, gaps, overlaps and strides of size-1 dims, with a spec that may or may not fit."""
    recurrent = draw(st.integers(0, 4)) == 0
    rank = draw(st.integers(2, 5) if draw(st.integers(0, 9)) == 0 else st.integers(3, 5))
    pages = draw(st.sampled_from((1, 1, 1, 2, 3))) if not recurrent else 1
    sizes = [num_blocks * pages] + [draw(st.sampled_from((1, 1, 2, 3, 4))) for _ in range(rank - 1)]
    block_dim = 0
    if rank == 5 and not recurrent and (sizes[0] == 2 or draw(st.booleans())):
        sizes[0], sizes[1], block_dim = 2, sizes[0], 1  # rank 5 that begins with 2 is K and V first
    if draw(st.integers(0, 7)) == 0:
        sizes[-1] = 132
    strides = [0] * rank
    run = 1
    order = draw(st.permutations(range(rank))) if draw(st.booleans()) else [*range(rank)][::-1]
    for dim in order:
        gap = draw(st.sampled_from((0,) * 19 + (1, 2, -1))) if run > 1 else 0
        strides[dim] = max(run + gap, 0)
        run = max(run, strides[dim] * sizes[dim])
        if sizes[dim] == 1 and draw(st.integers(0, 3)) == 0:
            strides[dim] = draw(st.integers(0, 200))
    dtype = torch.uint8 if sizes[-1] == 132 else draw(st.sampled_from(DTYPES))
    content = prod(sizes) // num_blocks * dtype.itemsize
    states = draw(st.sampled_from([*sorted({size * pages for size in sizes[1:]}), 1, 4]))
    spec = LeafSpec(
        Kind.MAMBA if recurrent else draw(st.sampled_from((*ATTENTION_KINDS, Kind.MLA_ATTENTION, Kind.SLIDING_WINDOW_MLA))),
        draw(st.sampled_from((states, states, 2 * states, 4, 3))),
        content + draw(st.sampled_from((0, 0, 8, 64, -1))),
        1 if recurrent else states,
        draw(st.sampled_from((None, None, content))),
        sliding_window_tokens=16,
        mamba_cache_mode="align" if recurrent else None,
    )
    start = draw(st.sampled_from((0, 0, 0, 1, 4, 40, 100)))
    return Laid(name, spec, (Cut("s", dtype, tuple(sizes), tuple(strides), start),), block_dim, pages, recurrent and draw(st.booleans()))


@st.composite
def arbitrary(draw: st.DrawFn) -> World:
    """A few arbitrary layers in one storage, overlapping or not, in one group or two."""
    num_blocks = draw(st.sampled_from((1, 2, 3, 4)))
    layers = [draw(arbitrary_layers(f"x.{index}", num_blocks)) for index in range(draw(st.integers(1, 3)))]
    if draw(st.booleans()):
        layers.append(
            replace(
                layers[0], name="again", cuts=tuple(replace(cut, offset=cut.offset + draw(st.integers(0, 300))) for cut in layers[0].cuts)
            )
        )
    end = max(_end(cut) for laid in layers for cut in laid.cuts)
    split = draw(st.integers(1, len(layers)))
    parts = [part for part in (layers[:split], layers[split:]) if part]
    groups = tuple(OfferedGroup(tuple(x.name for x in part), num_blocks, {x.name: x.spec for x in part}) for part in parts)
    size = max(end + draw(st.sampled_from((0,) * 5 + (64, 64, -1))), 0)
    return World(groups, tuple(layers), {"s": size}, draw(st.sampled_from(("NHD", "HND", "LBNHC", "LBHNC", "BLNHC", "BLHNC", None))))


@st.composite
def alike(draw: st.DrawFn) -> World:
    """Layers of one group that look the same by shape and dtype, each in a storage and a memory order of its own.

    The transfer tells layers apart by little more than shape, so these are what it would most easily confuse.
    """
    num_blocks = draw(st.sampled_from((1, 2, 3, 5)))
    sizes = {"N": draw(st.sampled_from((1, 2, 4))), "H": draw(st.sampled_from((1, 2, 4))), "C": draw(st.sampled_from((4, 6, 8, 132)))}
    dtype = torch.uint8 if sizes["C"] == 132 else torch.bfloat16
    logical = draw(st.sampled_from(("BHNC", "BNC", "KBNHC", "BKNHC")))
    sizes |= {"K": 2} if "K" in logical else {}
    sizes = {dim: sizes[dim] for dim in logical if dim != "B"}
    kind = draw(st.sampled_from((Kind.FULL_ATTENTION, Kind.SLIDING_WINDOW)))
    pages = draw(st.sampled_from((1, 1, 2)))
    layers, storages = [], {}
    for index in range(draw(st.integers(2, 4))):
        memory = draw(st.sampled_from([order for order in ("HNC", "NHC", "NC", "KHNC", "KNHC") if set(order) == set(sizes)]))
        memory = "KB" + memory[1:] if logical[0] == "K" and draw(st.booleans()) else memory
        page = Page(dtype, sizes, logical, memory, pages)
        page_bytes = page.content_bytes + (draw(st.sampled_from((0, 0, 16, 64))) if pages == 1 and "B" not in memory else 0)
        window = page.states * draw(st.sampled_from((4, 4, 8))) if kind is Kind.SLIDING_WINDOW else None
        spec = LeafSpec(kind, page.states, page_bytes, page.states, sliding_window_tokens=window)
        cut = page.cut(f"s{index}", 0, page_bytes, num_blocks)
        layers.append(Laid(f"x.{index}", spec, (cut,), logical.index("B"), pages))
        storages[f"s{index}"] = num_blocks * page_bytes
    group = OfferedGroup(tuple(laid.name for laid in layers), num_blocks, {laid.name: laid.spec for laid in layers})
    return World((group,), tuple(layers), storages, draw(st.sampled_from(("NHD", "HND", "LBNHC", "BLHNC", None))))
