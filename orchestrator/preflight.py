"""The answer of `kvreg preflight`: every planned worker's verdict, what was planned, and how sure each line of it is."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from orchestrator.check import Accepted, Rejected, check, document
from orchestrator.engine.preflight.plan import Planned, PlannedWorker
from stages.model import Offer, OfferedGroup


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the answer. What is not certain was assumed, and `because` says what it rests on."""

    name: str
    value: str
    certain: bool
    because: str


@dataclass(frozen=True, slots=True)
class GroupLine:
    """One KV cache group of a worker, by its specs: bytes are of one layer, padding is of its page."""

    group: int
    kinds: tuple[str, ...]
    layers: int
    logical_block_tokens: int
    kernel_block_tokens: int
    backends: tuple[str, ...]
    page_bytes: int
    content_bytes: int
    tokens_per_block: int

    @property
    def padding_share(self) -> float:
        """The part of a page that holds nothing, 0 to 1."""
        return 1 - self.content_bytes / self.page_bytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes of all the group's layers that a token of a stored block costs; recurrent state counts once a block."""
        return self.layers * self.content_bytes / self.tokens_per_block


@dataclass(frozen=True, slots=True)
class Checked:
    """One worker with its verdict and groups."""

    worker: PlannedWorker
    verdict: Accepted | Rejected
    groups: tuple[GroupLine, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """All workers of one model under one set of flags."""

    model: str
    planned: Planned
    workers: tuple[Checked, ...]

    @property
    def accepted(self) -> bool:
        """Whether every worker would register."""
        return all(isinstance(checked.verdict, Accepted) for checked in self.workers)

    @property
    def chunk_tokens(self) -> int:
        """The smallest LMCache chunk: a multiple of the tokens per block of every group of every worker."""
        return lcm(*(group.tokens_per_block for checked in self.workers for group in checked.groups))

    @property
    def bytes_per_token(self) -> float:
        """Bytes that a token costs over all workers."""
        return sum(group.bytes_per_token for checked in self.workers for group in checked.groups)

    @property
    def padding_share(self) -> float:
        """The part of all pages, weighed by their bytes, that holds nothing."""
        pages = sum(group.layers * group.page_bytes for checked in self.workers for group in checked.groups)
        content = sum(group.layers * group.content_bytes for checked in self.workers for group in checked.groups)
        return 1 - content / pages if pages else 0.0

    @property
    def distinct(self) -> tuple[tuple[Checked, ...], ...]:
        """Workers by what they would register; ranks that differ in nothing but their number are together."""
        alike: dict[str, list[Checked]] = {}
        for checked in self.workers:
            alike.setdefault(repr((checked.worker.groups, document("", checked.verdict))), []).append(checked)
        return tuple(map(tuple, alike.values()))


def answer(model: str, planned: Planned) -> Answer:
    """Every planned worker through validate, edit, proof and groups."""
    return Answer(model, planned, tuple(Checked(worker, check(worker.offer), tuple(_groups(worker))) for worker in planned.workers))


def _groups(worker: PlannedWorker) -> Iterator[GroupLine]:
    for index, (group, facts) in enumerate(zip(worker.offer.groups, worker.groups, strict=True)):
        if group.specs:
            yield GroupLine(
                index,
                tuple(sorted({str(spec.kind) for spec in group.specs.values()})),
                len(group.specs),
                facts.logical_block_tokens,
                facts.kernel_block_tokens,
                facts.backends,
                *_bytes(group),
                _tokens_per_block(group, worker.offer),
            )


def _bytes(group: OfferedGroup) -> tuple[int, int]:
    """A layer's page and its content, averaged where layers of one group differ."""
    specs = group.specs.values()
    content = [spec.page_size_bytes if spec.unpadded_page_size_bytes is None else spec.unpadded_page_size_bytes for spec in specs]
    return sum(spec.page_size_bytes for spec in specs) // len(specs), sum(content) // len(specs)


def _tokens_per_block(group: OfferedGroup, offer: Offer) -> int:
    return max(spec.tokens_per_block(offer.dcp_size) for spec in group.specs.values())


# ------------------------------------------------------------------------------------------------------ how sure it is


def lines(told: Answer) -> tuple[Line, ...]:
    """What the answer says beside each worker's table, certain or assumed."""
    planned = told.planned
    first = planned.workers[0].offer
    engine = f"{first.engine.name} {first.engine.version}"
    here = planned.target is None
    machine = f"{engine} asks this machine" if planned.target is None else planned.target.assumption
    chosen = "named by a flag, and accepted" if planned.backend_chosen else "the engine's own choice for the machine"
    follows = "the engine's own code, for these backends"
    backends = sorted({name for checked in told.workers for group in checked.groups for name in group.backends})
    blocks = sorted({group.num_blocks for checked in told.workers for group in checked.worker.offer.groups})
    unknown = "as if a worker had 1 TiB: only a started engine knows; nothing else depends on it"
    workers = "1 worker" if len(told.workers) == 1 else f"{len(told.workers)} workers"
    return (
        Line("architecture", planned.architecture, True, f"{engine} built its layers"),
        Line("machine", "this one" if planned.target is None else planned.target.name, here, machine),
        Line("attention backends", ", ".join(backends), here or planned.backend_chosen, chosen),
        Line("layout", first.layout or "not said", here, follows),
        Line("block sizes", _sizes(told), here, follows),
        Line("LMCache chunk", f"{told.chunk_tokens} tokens or a multiple of it", here, "every group's tokens per block divide it"),
        Line("bytes per token", f"{told.bytes_per_token:,.0f}, of {workers}", here, "content of all layers, without padding"),
        Line("padding", f"{told.padding_share:.1%} of all pages", here, follows),
        Line(
            "blocks",
            ", ".join(f"{number:,}" for number in blocks),
            planned.memory_chosen,
            "from a flag" if planned.memory_chosen else unknown,
        ),
        Line("verdict", "accepted" if told.accepted else "rejected", here, "kvreg's proof of the tensors that the engine's code makes"),
        Line("--kv-transfer-config", planned.kv_transfer_config, True, "the one line"),
    )


def _sizes(told: Answer) -> str:
    """`544 logical, 32 kernel`, once each."""
    sizes = {(group.logical_block_tokens, group.kernel_block_tokens) for checked in told.workers for group in checked.groups}
    return "; ".join(f"{logical} logical, {kernel} kernel" for logical, kernel in sorted(sizes))


# ------------------------------------------------------------------------------------------------------------- as JSON


def as_json(told: Answer) -> dict[str, Any]:
    """The answer as one document: `check` in each worker is what `kvreg check --json` says of its snapshot."""
    return {
        "preflight": 1,
        "model": told.model,
        "outcome": "accepted" if told.accepted else "rejected",
        "lmcache_chunk_tokens": told.chunk_tokens,
        "bytes_per_token": told.bytes_per_token,
        "padding_share": told.padding_share,
        "kv_transfer_config": json.loads(told.planned.kv_transfer_config),
        "lines": [{"name": line.name, "value": line.value, "certain": line.certain, "because": line.because} for line in lines(told)],
        "workers": [_worker(told.model, checked) for checked in told.workers],
    }


def _worker(model: str, checked: Checked) -> Mapping[str, Any]:
    return {
        "tp_rank": checked.worker.tp_rank,
        "pp_rank": checked.worker.pp_rank,
        "groups": [_group(group) for group in checked.groups],
        "check": document(model, checked.verdict),
    }


def _group(group: GroupLine) -> Mapping[str, Any]:
    return {
        "group": group.group,
        "kinds": list(group.kinds),
        "layers": group.layers,
        "logical_block_tokens": group.logical_block_tokens,
        "kernel_block_tokens": group.kernel_block_tokens,
        "attention_backends": list(group.backends),
        "page_bytes": group.page_bytes,
        "content_bytes": group.content_bytes,
        "padding_share": group.padding_share,
        "bytes_per_token": group.bytes_per_token,
    }


def places(told: Answer, path: str) -> Sequence[tuple[str, Offer]]:
    """Where each worker's snapshot goes: the file itself for one, else its name with the rank in it."""
    offers = [checked.worker.offer for checked in told.workers]
    if len(offers) == 1:
        return [(path, offers[0])]
    stem, dot, suffix = path.rpartition(".")
    return [(f"{stem or suffix}-rank{offer.worker.rank}{dot if stem else ''}{suffix if stem else ''}", offer) for offer in offers]
