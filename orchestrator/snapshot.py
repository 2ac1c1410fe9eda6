"""A registration as a JSON file, out and in again: specs, block counts and the geometry of tensors, never their bytes.

Format 1 is `snapshot.schema.json` beside this file. What is read back are tensors on torch's `meta` device, which have
shapes, strides and shared storages but no memory: the stages run on them as on the engine's own.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from fractions import Fraction
from functools import cache
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from orchestrator.strict_json import Place, json_path, read_json
from stages.errors import SnapshotInvalid
from stages.model import CacheTensor, Engine, Kind, LayerCache, LeafSpec, Offer, OfferedGroup, Worker

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator, ValidationError

FORMAT = 1

MAX_TOKENS = 2**24
"""The most tokens or states that a block is read with."""

MAX_BYTES = 2**56
"""The most bytes that one tensor may span."""

_SPEC_FIELDS = {
    "block_size": "block_size",
    "page_size_bytes": "page_size_bytes",
    "unpadded_page_size_bytes": "unpadded_page_size_bytes",
    "num_states": "num_states",
    "sliding_window": "sliding_window_tokens",
    "mamba_cache_mode": "mamba_cache_mode",
    "prefix_cacheable": "prefix_cacheable",
    "dcp_sharded": "dcp_sharded",
}
"""A snapshot's words for the fields of `LeafSpec`; kind and tokens_per_state are converted, the rest is `described`."""

_FRACTION = re.compile(r"-?[0-9]{1,15}(/0*[1-9][0-9]{0,14})?")

_LINE_COLUMNS = 140


def read(path: str | os.PathLike[str]) -> Offer:
    """The registration in a snapshot, on `meta` tensors. Raises SnapshotInvalid, which names the file and the place in it."""
    from jsonschema.exceptions import best_match

    name = os.fspath(path)
    document = read_json(name)
    error = next(_validator().iter_errors(document), None)
    if error is not None:
        deepest = best_match([error])
        raise SnapshotInvalid(name, json_path(tuple(deepest.absolute_path)), _problem(deepest))
    assert isinstance(document, dict)  # the schema says so
    for place, problem in _nonsense(document):
        raise SnapshotInvalid(name, json_path(place), problem)
    return _offer(document)


def write(offer: Offer, path: str | os.PathLike[str]) -> None:
    """Write a registration's snapshot, whole or not at all: aside first, then renamed. Raises OSError."""
    target = Path(path)
    aside = target.with_name(f".{target.name}.{uuid4().hex}")
    try:
        aside.write_text(_json(_document(offer)) + "\n", encoding="utf-8")
        aside.replace(target)
    finally:
        with suppress(FileNotFoundError):
            aside.unlink()


# ----------------------------------------------------------------------------------------------------------------- reading


@cache
def _validator() -> "Draft202012Validator":
    """The schema, with integers as a registration has them: JSON Schema takes 6.0 for one."""
    # Imported here: a worker writes snapshots and never reads one, and this is a fifth of what its imports would take.
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    schema = json.loads((files("orchestrator") / "snapshot.schema.json").read_text(encoding="utf-8"))
    whole = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    strict: type[Draft202012Validator] = extend(Draft202012Validator, type_checker=whole)  # type: ignore[no-untyped-call]
    return strict(schema)


def _problem(error: "ValidationError") -> str:
    """A schema error in a few words; jsonschema's own quote the whole value, however large."""
    found: Any = error.instance
    wanted: Any = error.validator_value
    match error.validator:
        case "type":
            return f"is {_type(found)}, must be {_either([wanted] if isinstance(wanted, str) else wanted)}"
        case "minimum":
            return f"is {found}, must be at least {wanted}"
        case "const":
            return f"is {_short(found)}, must be {wanted}"
        case "enum":
            return f"is {_short(found)}, must be {_either(wanted)}"
        case "required":
            return f"lacks {', '.join(key for key in wanted if key not in found)}"
        case "oneOf" if isinstance(found, dict):
            return f"must have one of {_either(key for choice in wanted for key in choice.get('required', ()))}, not both"
        case "oneOf":
            return f"is {_type(found)}, must be object or array"
        case other:
            return f"breaks the schema's {other}"


def _type(value: object) -> str:
    names = {bool: "boolean", int: "integer", float: "a fraction", str: "string", list: "array", type(None): "null"}
    return names.get(type(value), "object")


def _either(names: Iterable[str]) -> str:
    return " or ".join(names)


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _nonsense(document: dict[str, Any]) -> Iterator[tuple[Place, str]]:
    """What the schema cannot say and no tensor can be made of."""
    for index, group in enumerate(document["groups"]):
        yield from _nonsense_spec(("groups", index, "spec"), group.get("spec"))
        for name, spec in group.get("specs", {}).items():
            yield from _nonsense_spec(("groups", index, "specs", name), spec)
    for name, registered in document["kv_caches"].items():
        if registered == []:
            yield ("kv_caches", name), "lists no tensor"
        for index, tensor in enumerate(_listed(registered)):
            place: Place = ("kv_caches", name, index) if isinstance(registered, list) else ("kv_caches", name)
            yield from _nonsense_tensor(place, tensor, document["storages"])


def _nonsense_spec(place: Place, spec: dict[str, Any] | None) -> Iterator[tuple[Place, str]]:
    if spec is None:
        return
    for key in ("block_size", "num_states"):
        if spec[key] > MAX_TOKENS:
            yield (*place, key), f"is {spec[key]}, at most {MAX_TOKENS} are read"
    if not _FRACTION.fullmatch(spec.get("tokens_per_state", "1")):
        yield (*place, "tokens_per_state"), f"is {_short(spec['tokens_per_state'])}, must be 'p' or 'p/q'"


def _nonsense_tensor(place: Place, tensor: dict[str, Any], storages: dict[str, Any]) -> Iterator[tuple[Place, str]]:
    if tensor["storage"] not in storages:
        yield (*place, "storage"), f"is {_short(tensor['storage'])}, which is not in $.storages"
    dtype = _dtype(tensor["dtype"])
    if dtype is None:
        yield (*place, "dtype"), f"is {_short(tensor['dtype'])}, which is no dtype of torch {torch.__version__}"
        return
    if not tensor["shape"]:
        yield (*place, "shape"), "has no dimension"
    if len(tensor["shape"]) != len(tensor["stride"]):
        yield (*place, "stride"), f"has {len(tensor['stride'])} entries for a shape of {len(tensor['shape'])}"
        return
    if _end_bytes(tensor, dtype) > MAX_BYTES or prod(max(size, 1) for size in tensor["shape"]) * dtype.itemsize > MAX_BYTES:
        yield (*place, "shape"), f"spans more than {MAX_BYTES} bytes"


def _dtype(name: str) -> torch.dtype | None:
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def _end_bytes(tensor: dict[str, Any], dtype: torch.dtype) -> int:
    """One past the last byte a tensor reaches in its storage."""
    last = sum((max(size, 1) - 1) * step for size, step in zip(tensor["shape"], tensor["stride"], strict=True))
    return int(tensor["storage_offset"] + last + 1) * dtype.itemsize


def _listed(registered: Any) -> list[dict[str, Any]]:
    return registered if isinstance(registered, list) else [registered]


def _offer(document: dict[str, Any]) -> Offer:
    memory = _memory(document)
    worker = document.get("worker", {})
    return Offer(
        engine=Engine(document["engine"]["name"], document["engine"]["version"]),
        groups=tuple(map(_group, document["groups"])),
        caches={
            name: LayerCache(
                tuple(_cache_tensor(tensor, memory[tensor["storage"]], document["storages"]) for tensor in _listed(registered)),
                listed=isinstance(registered, list),
            )
            for name, registered in document["kv_caches"].items()
        },
        layout=document["kv_layout"],
        dcp_size=document.get("dcp_size", 1),
        chunk_size_tokens=document.get("lmcache_chunk_size"),
        model_name=document.get("model_name", ""),
        worker=Worker(worker.get("rank", 0), worker.get("world_size", 1)),
    )


def _memory(document: dict[str, Any]) -> dict[str, torch.Tensor]:
    """One meta tensor of bytes for each storage, as long as whatever is cut from it needs.

    A tensor that runs past its storage is for the stages to refuse, by name; here it must only be possible to make. The
    storage's own size is kept beside the tensor.
    """
    ends = {key: storage["nbytes"] for key, storage in document["storages"].items()}
    for registered in document["kv_caches"].values():
        for tensor in _listed(registered):
            ends[tensor["storage"]] = max(ends[tensor["storage"]], _end_bytes(tensor, getattr(torch, tensor["dtype"])))
    # Rounded up, so that the bytes can be viewed as any dtype.
    return {key: torch.empty(-(-end // 16) * 16, dtype=torch.uint8, device="meta") for key, end in ends.items()}


def _cache_tensor(tensor: dict[str, Any], memory: torch.Tensor, storages: dict[str, Any]) -> CacheTensor:
    view = memory.view(getattr(torch, tensor["dtype"])).as_strided(tensor["shape"], tensor["stride"], tensor["storage_offset"])
    return CacheTensor(view, tensor["storage"], storages[tensor["storage"]]["nbytes"])


def _group(group: dict[str, Any]) -> OfferedGroup:
    names = tuple(group["layer_names"])
    specs = group["specs"] if "specs" in group else dict.fromkeys(names, group["spec"])
    return OfferedGroup(
        layer_names=names,
        num_blocks=group["num_blocks"],
        specs={name: _spec(spec) for name, spec in specs.items()},
        block_size=group.get("block_size"),
        transferable=group.get("transferable", True),
        host_resident=group.get("host_resident", False),
    )


def _spec(spec: dict[str, Any]) -> LeafSpec:
    return LeafSpec(
        kind=Kind(spec["kind"]),
        tokens_per_state=Fraction(spec.get("tokens_per_state", "1")),
        described={key: value for key, value in spec.items() if key not in {*_SPEC_FIELDS, "kind", "tokens_per_state"}},
        **{field: spec[key] for key, field in _SPEC_FIELDS.items() if key in spec},
    )


# ----------------------------------------------------------------------------------------------------------------- writing


def _document(offer: Offer) -> dict[str, Any]:
    """The snapshot as JSON values, keys in the schema's order."""
    parts = [part for cache in offer.caches.values() for part in cache.tensors]
    return {
        "kvreg_snapshot": FORMAT,
        "engine": {"name": offer.engine.name, "version": offer.engine.version},
        "model_name": offer.model_name,
        "worker": {"rank": offer.worker.rank, "world_size": offer.worker.world_size},
        "kv_layout": offer.layout,
        "dcp_size": offer.dcp_size,
        **({} if offer.chunk_size_tokens is None else {"lmcache_chunk_size": offer.chunk_size_tokens}),
        "groups": [_group_document(group) for group in offer.groups],
        "storages": {part.storage: _storage_document(part) for part in parts},
        "kv_caches": {name: _cache_document(cache) for name, cache in offer.caches.items()},
    }


def _storage_document(part: CacheTensor) -> dict[str, Any]:
    device = {} if part.tensor.is_meta else {"device": str(part.tensor.device)}
    return {"nbytes": part.storage_size_bytes, **device}


def _cache_document(cache: LayerCache) -> list[dict[str, Any]] | dict[str, Any]:
    tensors = [
        {
            "storage": part.storage,
            "dtype": str(part.tensor.dtype).removeprefix("torch."),
            "shape": list(part.tensor.shape),
            "stride": list(part.tensor.stride()),
            "storage_offset": part.tensor.storage_offset(),
        }
        for part in cache.tensors
    ]
    return tensors if cache.listed else tensors[0]


def _group_document(group: OfferedGroup) -> dict[str, Any]:
    """A group; one `spec` where all its layers have the same."""
    specs = {name: _spec_document(spec) for name, spec in group.specs.items()}
    same = set(specs) == set(group.layer_names) and all(spec == specs[group.layer_names[0]] for spec in specs.values()) and specs
    return {
        "layer_names": list(group.layer_names),
        "num_blocks": group.num_blocks,
        **({"spec": specs[group.layer_names[0]]} if same else {"specs": specs}),
        **({} if group.block_size is None else {"block_size": group.block_size}),
        **({} if group.transferable else {"transferable": False}),
        **({"host_resident": True} if group.host_resident else {}),
    }


def _spec_document(spec: LeafSpec) -> dict[str, Any]:
    fields = {key: getattr(spec, field) for key, field in _SPEC_FIELDS.items()}
    return {
        "kind": str(spec.kind),
        **{key: value for key, value in fields.items() if value is not None and (key, value) != ("prefix_cacheable", True)},
        **({} if spec.tokens_per_state == 1 else {"tokens_per_state": str(spec.tokens_per_state)}),
        **{key: _described(value) for key, value in spec.described.items() if key not in {*fields, "kind", "tokens_per_state"}},
    }


def _described(value: object) -> Any:
    """What the engine said beside the facts, as JSON."""
    match value:
        case torch.dtype():
            return str(value).removeprefix("torch.")
        case bool() | int() | str() | None:
            return value
        case list() | tuple():
            return [_described(member) for member in value]
        case Mapping():
            return {str(key): _described(member) for key, member in value.items()}
        case _:
            return str(value)


def _json(value: Any, indent: str = "") -> str:
    """JSON as a person reads it: a value that fits on one line stands on one line."""
    flat = json.dumps(value)
    if (len(indent) + len(flat) <= _LINE_COLUMNS and indent) or not isinstance(value, dict | list) or not value:
        return flat
    inner = indent + "  "
    if isinstance(value, dict):
        members = [f"{inner}{json.dumps(key)}: {_json(member, inner)}" for key, member in value.items()]
    else:
        members = [inner + _json(member, inner) for member in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n" + ",\n".join(members) + f"\n{indent}{closing}"
