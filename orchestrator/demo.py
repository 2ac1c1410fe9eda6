"""The main job once, on this machine's memory: four workers registered at once, their blocks stored, lost and brought back.

The caches are those of a hybrid of 18 recurrent and 6 attention layers (Qwen3.5-0.8B's geometry), as real CPU memory. Bytes
are written and compared through the raw tensors, by the engine's own indices; what moves them knows only the edited views.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from metrics.observer import Outcome, Run, StageResult
from metrics.prometheus import PrometheusObserver
from orchestrator.backend.embedded import EmbeddedBackend
from orchestrator.pipeline import Settings, register_all
from stages.errors import KVRegError, RegistrationRejected, Rejection, Stage
from stages.model import CacheTensor, Engine, Kind, LayerCache, LeafSpec, Offer, OfferedGroup, Plan, Receipt, Worker

LAYERS, PERIOD = 24, 4
"""Of every four layers the last is attention, the others are recurrent; each of the four is a group of its own."""

NUM_BLOCKS, BLOCK_TOKENS, KERNEL_TOKENS = 8, 544, 32
HEADS, CONTENT = 2, 2 * 256
CONV_SHAPE, SSM_SHAPE = (3, 6144), (16, 128, 128)
CONV_BYTES = 3 * 6144 * 2
STATE_BYTES = CONV_BYTES + 16 * 128 * 128 * 4
PAGE_BYTES = BLOCK_TOKENS * HEADS * CONTENT * 2

STORED = {0: (1,), 1: (2,), 2: (3,), 3: (4, 5, 6, 7)}
"""The blocks that are stored, by group. Block 0 is nobody's, as in the engine."""

RETRIEVED = {0: (2,), 1: (3,), 2: (1,), 3: (7, 4, 5, 6)}
"""Where they are brought back to: other blocks than they came from, as after an eviction."""

LOST = 0xA5
"""What every byte of the engine's memory is overwritten with before the blocks are brought back."""

MODEL_NAME = "hybrid-24l"


@dataclass(frozen=True, slots=True)
class Demonstrated:
    """What one worker's registration came to, and how many of its bytes came back."""

    worker: str
    offer: Offer
    states: str
    outcome: Receipt | KVRegError
    stage_s: Mapping[Stage, float]
    stored_bytes: int = 0
    """Bytes the backend copied out of the engine's memory: blocks with the padding their views cover."""
    owned_bytes: int = 0
    """Bytes of the stored blocks that hold content, all of them compared."""
    right_bytes: int = 0
    untouched: bool = False
    """Whether block 0 of every storage, which nobody stored, is as the overwriting left it."""

    @property
    def plan(self) -> Plan | None:
        """What is registered; None for a worker that was refused."""
        return self.outcome.plan if isinstance(self.outcome, Receipt) else None

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """What it was refused for."""
        return self.outcome.rejections if isinstance(self.outcome, RegistrationRejected) else ()


@dataclass(frozen=True, slots=True)
class Demonstration:
    """All of it: the workers, the seconds that the bytes took, and the metrics that were counted, `(name, labels, value)`."""

    workers: tuple[Demonstrated, ...]
    store_s: float
    retrieve_s: float
    counted: tuple[tuple[str, Mapping[str, str], float], ...]

    @property
    def proven(self) -> bool:
        """Whether every byte came back where it was wanted, nothing else was touched, and only the bad worker was refused."""
        good, bad = self.workers[:-1], self.workers[-1]
        return bool(bad.rejections) and all(
            worker.plan is not None and worker.untouched and worker.right_bytes == worker.owned_bytes > 0 for worker in good
        )


class StageTimes:
    """An observer that keeps how long each stage of each worker took, in seconds."""

    def __init__(self) -> None:
        self.of: dict[str, dict[Stage, float]] = {}

    def started(self, run: Run) -> None:
        """A worker begins."""
        self.of[run.worker_id] = {}

    def stage_finished(self, run: Run, stage: Stage, duration_s: float, result: StageResult) -> None:  # noqa: ARG002 - an observer is told it
        """Keep the time."""
        self.of[run.worker_id][stage] = duration_s

    def finished(self, run: Run, outcome: Outcome, cause: BaseException | None) -> None:
        """The times stay."""

    def recovered(self, run: Run, outcome: Outcome) -> None:
        """The times stay."""

    def bypassed(self, run: Run, cause: BaseException) -> None:
        """The times stay."""


async def demonstrate(backend: EmbeddedBackend | None = None) -> Demonstration:
    """Register five workers at once, one of which cannot be served; store, overwrite and retrieve the others' blocks.

    What is proven is the backend's doing too: one that loses a byte makes `proven` false.
    """
    offers = {
        "0": offer(0, "NHD", listed_states=True),
        "1": offer(1, "HND", listed_states=True),
        "2": offer(2, "LBNHC", listed_states=False),
        "3": offer(3, "LBHNC", listed_states=False),
        "4": offer(4, "NHD", listed_states=False, mode="none"),
    }
    backend, times, metrics = backend or EmbeddedBackend(), StageTimes(), PrometheusObserver()
    outcomes = await register_all(offers, dict.fromkeys(offers, backend), Settings(observers=(times, metrics)))
    workers = [Demonstrated(name, offers[name], _states(offers[name]), outcome, times.of[name]) for name, outcome in outcomes.items()]
    for worker in workers:
        for index, _ in _served(worker):
            fill(worker.offer, index, STORED[index])
    begin = time.perf_counter()
    stored = [sum(_store(backend, worker)) for worker in workers]
    store_s = time.perf_counter() - begin
    for worker in workers:
        if worker.plan is not None:
            lose(worker.offer)
    begin = time.perf_counter()
    for worker in workers:
        _retrieve(backend, worker)
    retrieve_s = time.perf_counter() - begin
    workers = [replace(_compared(worker), stored_bytes=moved) for worker, moved in zip(workers, stored, strict=True)]
    return Demonstration(tuple(workers), store_s, retrieve_s, tuple(_counted(metrics)))


# ------------------------------------------------------------------------------------------------------------ the engine


def offer(rank: int, layout: str, *, listed_states: bool, mode: str = "align") -> Offer:
    """One worker's caches, zeroed: its groups overlay each other page by page, as the engine's block pool lets them.

    `listed_states`: a list `[conv, ssm]` in one padded page and a storage for each layer of a group, else one int8 tensor
    `[NB, 1, 1, C]` and one storage for all.
    """
    state = LeafSpec(Kind.MAMBA, BLOCK_TOKENS, PAGE_BYTES, 1, STATE_BYTES, mamba_cache_mode=mode)
    attention = LeafSpec(Kind.FULL_ATTENTION, BLOCK_TOKENS, PAGE_BYTES, BLOCK_TOKENS, PAGE_BYTES)
    places = LAYERS // PERIOD
    whole = torch.zeros(places * NUM_BLOCKS * PAGE_BYTES, dtype=torch.uint8)
    pages = [part.clone() if listed_states else part for part in whole.view(places, -1)]
    caches: dict[str, LayerCache] = {}
    names: dict[int, list[str]] = {index: [] for index in range(PERIOD)}
    for layer in range(LAYERS):
        place, group = divmod(layer, PERIOD)
        recurrent = group < PERIOD - 1
        name = f"layers.{layer}.{'linear_attn' if recurrent else 'self_attn'}"
        tensors = _states_of(pages[place], listed=listed_states) if recurrent else [_attention(pages[place], layout)]
        storage = f"storage-{rank}-{place if listed_states else 0}"
        size = tensors[0].untyped_storage().nbytes()
        caches[name] = LayerCache(tuple(CacheTensor(tensor, storage, size) for tensor in tensors), recurrent and listed_states)
        names[group].append(name)
    groups = tuple(
        OfferedGroup(tuple(members), NUM_BLOCKS, dict.fromkeys(members, state if group < PERIOD - 1 else attention))
        for group, members in names.items()
    )
    return Offer(Engine("demo", "1"), groups, caches, layout, model_name=MODEL_NAME, worker=Worker(rank, 5))


def _states_of(page: torch.Tensor, *, listed: bool) -> list[torch.Tensor]:
    """`conv | ssm | padding` in every page."""
    if not listed:
        shape, stride = (page.numel() // PAGE_BYTES, 1, 1, STATE_BYTES), (PAGE_BYTES, STATE_BYTES, STATE_BYTES, 1)
        return [page.view(torch.int8).as_strided(shape, stride)]
    blocks = page.view(-1, PAGE_BYTES)
    conv, ssm = blocks[:, :CONV_BYTES].view(torch.bfloat16), blocks[:, CONV_BYTES:STATE_BYTES].view(torch.float32)
    return [conv.unflatten(1, CONV_SHAPE), ssm.unflatten(1, SSM_SHAPE)]


def _attention(page: torch.Tensor, layout: str) -> torch.Tensor:
    """`[P, H, s, 2D]`, kernel pages of 32 tokens; in memory token-major for NHD, heads first for HND."""
    if layout in {"NHD", "LBNHC"}:
        return page.view(torch.bfloat16).view(-1, KERNEL_TOKENS, HEADS, CONTENT).transpose(1, 2)
    return page.view(torch.bfloat16).view(-1, HEADS, KERNEL_TOKENS, CONTENT)


def fill(offered: Offer, group: int, block_ids: Sequence[int]) -> None:
    """Write the pattern of each block of a group, through the raw tensors."""
    for number, block in enumerate(block_ids):
        for place, rows in _raw_rows(offered, group, block):
            rows.copy_(_pattern(place, number, rows))


def right_bytes(offered: Offer, group: int, block_ids: Sequence[int]) -> tuple[int, int]:
    """How many bytes the blocks of a group hold, and how many of them are the pattern's, through the raw tensors."""
    owned = right = 0
    for number, block in enumerate(block_ids):
        for place, rows in _raw_rows(offered, group, block):
            owned += rows.numel()
            right += int((rows == _pattern(place, number, rows)).sum())
    return owned, right


def lose(offered: Offer) -> None:
    """Overwrite all of a worker's memory, padding included."""
    for memory in memories(offered):
        memory.fill_(LOST)


def memories(offered: Offer) -> list[torch.Tensor]:
    """Each storage of a worker once, whole, as bytes."""
    storages = {part.storage: part.tensor.untyped_storage() for cache in offered.caches.values() for part in cache.tensors}
    return [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages.values()]


def _raw_rows(offered: Offer, group: int, block: int) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """The bytes of one block in each raw tensor of a group, with where they are: worker, group, layer, tensor."""
    members = offered.groups[group]
    for layer, name in enumerate(members.layer_names):
        for index, part in enumerate(offered.caches[name].tensors):
            pages = part.tensor.shape[0] // members.num_blocks
            rows = part.tensor[block * pages : (block + 1) * pages]
            yield (offered.worker.rank, group, layer, index), rows.view(torch.uint8)


def _pattern(place: tuple[int, ...], number: int, like: torch.Tensor) -> torch.Tensor:
    """Random bytes that no other place and block has, the same whenever they are asked for."""
    seed = 0
    for part in (*place, number):
        seed = seed * 100 + part + 1
    words = torch.randint(-(2**63), 2**63 - 1, (like.numel() // 8,), dtype=torch.int64, generator=torch.Generator().manual_seed(seed))
    return words.view(torch.uint8).view(like.shape)


# ------------------------------------------------------------------------------------------------------------- the bytes


def _served(worker: Demonstrated) -> Iterator[tuple[int, str]]:
    """The groups of a registered worker, with its registration."""
    if isinstance(worker.outcome, Receipt):
        for group in sorted({group.engine_group_id for group in worker.outcome.plan.groups}):
            yield group, worker.outcome.registration


def _store(backend: EmbeddedBackend, worker: Demonstrated) -> Iterator[int]:
    for group, registration in _served(worker):
        yield backend.store(registration, group, STORED[group], range(len(STORED[group])))


def _retrieve(backend: EmbeddedBackend, worker: Demonstrated) -> None:
    for group, registration in _served(worker):
        backend.retrieve(registration, group, RETRIEVED[group], range(len(RETRIEVED[group])))


def _compared(worker: Demonstrated) -> Demonstrated:
    """The worker with its bytes counted."""
    counts = [right_bytes(worker.offer, group, RETRIEVED[group]) for group, _ in _served(worker)]
    nobody = [rows for group, _ in _served(worker) for _, rows in _raw_rows(worker.offer, group, 0)]
    return replace(
        worker,
        owned_bytes=sum(owned for owned, _ in counts),
        right_bytes=sum(right for _, right in counts),
        untouched=bool(nobody) and all(bool((rows == LOST).all()) for rows in nobody),
    )


def _states(offered: Offer) -> str:
    first = next(iter(offered.caches.values()))
    return "list [conv, ssm]" if first.listed else "one int8 tensor"


def _counted(metrics: PrometheusObserver) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Every series that is not zero, without histogram buckets."""
    for metric in metrics.registry.collect():
        for sample in metric.samples:
            if sample.value and not sample.name.endswith("_bucket"):
                yield sample.name, sample.labels, sample.value
