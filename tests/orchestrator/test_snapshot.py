"""A registration as a file: what is written is read back as the same geometry, and what is no snapshot is said to be none."""

import errno
import json
import os
import pickle
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from orchestrator import snapshot
from orchestrator.check import check
from orchestrator.strict_json import MAX_FILE_BYTES
from stages.errors import KVRegError, SnapshotInvalid
from stages.model import CacheTensor, Engine, Kind, LayerCache, LeafSpec, Offer, OfferedGroup, Worker
from tests import offers

CASES = Path(__file__).parent.parent / "cases"
LISTED = CASES / "0.26.0-NHD-qwen3-5-0-8b-flashinfer.json"
FLAT = CASES / "0.33.0-LBNHC-qwen3-5-0-8b-flashinfer.json"
PAST_STORAGE = CASES / "refuse-033-runs-past-the-storage.json"

SCHEMA = Draft202012Validator(json.loads((Path(snapshot.__file__).parent / "snapshot.schema.json").read_text()))

Document = dict[str, Any]


def facts(offer: Offer) -> object:
    """All that an offer says, with tensors as their geometry; storages by which tensors share one, not by name."""
    first_seen: dict[str, int] = {}
    caches = [
        (
            name,
            cache.listed,
            [
                (
                    first_seen.setdefault(part.storage, len(first_seen)),
                    part.storage_size_bytes,
                    part.tensor.dtype,
                    tuple(part.tensor.shape),
                    part.tensor.stride(),
                    part.tensor.storage_offset(),
                )
                for part in cache.tensors
            ],
        )
        for name, cache in offer.caches.items()
    ]
    groups = [(group.layer_names, group.num_blocks, group.block_size, group.transferable, group.host_resident) for group in offer.groups]
    specs = [dict(group.specs) for group in offer.groups]
    return (
        (offer.engine, offer.layout, offer.dcp_size, offer.chunk_size_tokens, offer.model_name, offer.worker),
        (groups, specs, caches),
    )


# --------------------------------------------------------------------------------------------------------- any registration

NAMES = st.text(max_size=12)
DTYPES = st.sampled_from([torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float16])
DESCRIBED = st.dictionaries(
    st.sampled_from(["class", "num_kv_heads", "head_size", "kv_quant_mode", "state_shapes", "extra"]),
    st.one_of(st.integers(0, 9), st.booleans(), NAMES, st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=2)),
    max_size=3,
).map(lambda said: {key: value for key, value in said.items() if _schema_allows(key, value)})


def _schema_allows(key: str, value: object) -> bool:
    wanted = {"class": str, "num_kv_heads": int, "head_size": int, "kv_quant_mode": str, "state_shapes": list}
    return key not in wanted or type(value) is wanted[key]


SPECS = st.builds(
    LeafSpec,
    kind=st.sampled_from(Kind),
    block_size=st.integers(1, 2**24),
    page_size_bytes=st.integers(1, 2**40),
    num_states=st.integers(1, 2**24),
    unpadded_page_size_bytes=st.none() | st.integers(1, 2**40),
    tokens_per_state=st.fractions(-9, 9, max_denominator=99) | st.just(Fraction(1)),
    sliding_window_tokens=st.none() | st.integers(0, 9999),
    mamba_cache_mode=st.none() | st.sampled_from(["none", "align", "all"]),
    prefix_cacheable=st.booleans(),
    dcp_sharded=st.none() | st.booleans(),
    described=DESCRIBED,
)


@st.composite
def _groups(draw: st.DrawFn) -> OfferedGroup:
    names = tuple(draw(st.lists(NAMES, max_size=3, unique=True)))
    specs = dict.fromkeys(names, draw(SPECS)) if draw(st.booleans()) else draw(st.dictionaries(NAMES, SPECS, max_size=3))
    flags = draw(st.tuples(st.none() | st.integers(1, 99), st.booleans(), st.booleans()))
    return OfferedGroup(names, draw(st.integers(0, 2**40)), specs, *flags)


@st.composite
def _caches(draw: st.DrawFn) -> dict[str, LayerCache]:
    """Tensors of few storages, of any shape, stride and offset, also past the end that the engine names."""
    sizes = draw(st.lists(st.integers(0, 2**45), min_size=1, max_size=3))
    memories = [torch.empty(2**50, dtype=torch.uint8, device="meta") for _ in sizes]

    def tensor() -> CacheTensor:
        index = draw(st.integers(0, len(sizes) - 1))
        shape = draw(st.lists(st.integers(0, 99), min_size=1, max_size=5))
        stride = draw(st.lists(st.integers(0, 2**36), min_size=len(shape), max_size=len(shape)))
        view = memories[index].view(draw(DTYPES)).as_strided(shape, stride, draw(st.integers(0, 2**40)))
        return CacheTensor(view, f"s{index}", sizes[index])

    caches = {}
    for name in draw(st.lists(NAMES, max_size=4, unique=True)):
        listed = draw(st.booleans())
        caches[name] = LayerCache(tuple(tensor() for _ in range(draw(st.integers(1, 3)) if listed else 1)), listed)
    return caches


OFFERS = st.builds(
    Offer,
    engine=st.builds(Engine, NAMES, NAMES),
    groups=st.lists(_groups(), max_size=3).map(tuple),
    caches=_caches(),
    layout=st.none() | NAMES,
    dcp_size=st.integers(1, 8),
    chunk_size_tokens=st.none() | st.integers(1, 9999),
    model_name=NAMES,
    worker=st.builds(Worker, st.integers(0, 7), st.integers(1, 8)),
)


@given(offer=OFFERS)
def test_any_registration_is_read_back_as_it_was_written(offer: Offer, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever a worker offers, its snapshot holds it, by the published schema: a replay judges what the worker would have registered."""
    path = tmp_path_factory.getbasetemp() / "offer.json"
    snapshot.write(offer, path)
    assert facts(snapshot.read(path)) == facts(offer)
    assert not list(SCHEMA.iter_errors(json.loads(path.read_text())))


def test_the_schema_is_one() -> None:
    """Others can validate our snapshots with any implementation of JSON Schema."""
    Draft202012Validator.check_schema(SCHEMA.schema)


def test_engines_own_snapshots_are_read_back_as_written(tmp_path: Path) -> None:
    """A snapshot that went through kvreg says the same as the one an engine release made."""
    for case in sorted(CASES.glob("*-qwen3-5-*.json")):
        if not case.name.endswith(".expect.json"):
            offer = snapshot.read(case)
            snapshot.write(offer, tmp_path / "again.json")
            assert facts(snapshot.read(tmp_path / "again.json")) == facts(offer), case.name


# ------------------------------------------------------------------------------------------------------------------ reading


def test_tensors_of_one_storage_share_memory() -> None:
    """Layers that overlay each other in the engine overlay each other in the replay, so that the proof sees it."""
    parts = [part for cache in snapshot.read(LISTED).caches.values() for part in cache.tensors]
    memory = {part.storage: part.tensor.untyped_storage()._cdata for part in parts}
    assert len(set(memory.values())) == len(memory) == 2
    assert all(part.tensor.untyped_storage()._cdata == memory[part.storage] for part in parts)
    assert all(part.tensor.is_meta for part in parts)


def test_a_storage_keeps_its_own_size_where_a_tensor_runs_past_it() -> None:
    """A registration that is wrong can be replayed: the tensors exist, and the size that they break is known."""
    document = json.loads(PAST_STORAGE.read_text())
    parts = [part for cache in snapshot.read(PAST_STORAGE).caches.values() for part in cache.tensors]
    assert {part.storage: part.storage_size_bytes for part in parts} == {
        key: storage["nbytes"] for key, storage in document["storages"].items()
    }
    assert any(part.tensor.untyped_storage().nbytes() > part.storage_size_bytes for part in parts)


def test_what_a_snapshot_leaves_out_has_the_engines_default(tmp_path: Path) -> None:
    """A snapshot written by hand needs no more than the schema asks for."""
    path = tmp_path / "short.json"
    path.write_text(
        '{"kvreg_snapshot": 1, "engine": {"name": "e", "version": "1"}, "kv_layout": null, "groups": [], "storages": {}, "kv_caches": {}}'
    )
    assert snapshot.read(path) == Offer(Engine("e", "1"), (), {})


# ------------------------------------------------------------------------------------------------------------------ writing


def test_no_byte_of_a_tensor_is_written(tmp_path: Path) -> None:
    """A snapshot can be sent to a stranger: what the caches hold is not in it."""
    first, second = offers.hybrid(), offers.hybrid()
    offers.fill(second, seed=1)
    texts = []
    for offer in (first, second):
        snapshot.write(offer, tmp_path / "s.json")
        text = (tmp_path / "s.json").read_text()
        for number, storage in enumerate(dict.fromkeys(part.storage for cache in offer.caches.values() for part in cache.tensors)):
            text = text.replace(f'"{storage}"', f'"storage {number}"')
        texts.append(text)
    assert texts[0] == texts[1]


def test_it_says_which_device_held_the_caches(tmp_path: Path) -> None:
    """Whoever reads a snapshot sees whether it came from a GPU."""
    snapshot.write(offers.hybrid(), tmp_path / "s.json")
    storages = json.loads((tmp_path / "s.json").read_text())["storages"]
    assert [storage["device"] for storage in storages.values()] == ["cpu", "cpu"]


def test_a_person_can_read_it(tmp_path: Path) -> None:
    """One tensor, one line; keys always in the same order."""
    snapshot.write(snapshot.read(FLAT), tmp_path / "s.json")
    text = (tmp_path / "s.json").read_text()
    lines = text.splitlines()
    assert max(map(len, lines)) <= 200
    assert sum('"dtype": "int8"' in line and '"storage_offset"' in line for line in lines) == 6
    assert list(json.loads(text)) == [
        *("kvreg_snapshot", "engine", "model_name", "worker", "kv_layout", "dcp_size", "groups", "storages", "kv_caches"),
    ]
    snapshot.write(snapshot.read(FLAT), tmp_path / "t.json")
    assert (tmp_path / "t.json").read_text() == text


def test_an_old_snapshot_stays_whole_until_the_new_one_is(tmp_path: Path) -> None:
    """Whoever has the file open while it is written anew reads the old one to its end."""
    path = tmp_path / "s.json"
    snapshot.write(snapshot.read(FLAT), path)
    before = path.read_text()
    with path.open() as reader:
        snapshot.write(snapshot.read(LISTED), path)
        assert reader.read() == before
    assert path.read_text() != before
    assert os.listdir(tmp_path) == ["s.json"]


def test_a_snapshot_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """A failed write says so and leaves no half of a file behind."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(OSError, match="taken"):
        snapshot.write(offers.hybrid(), tmp_path / "taken")
    assert os.listdir(tmp_path) == ["taken"]


# ------------------------------------------------------------------------------------------------------- what is no snapshot


def _set(*place: str | int, value: object) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        inner: Any = document
        for step in place[:-1]:
            inner = inner[step]
        inner[place[-1]] = value

    return change


def _drop(*place: str | int) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        inner: Any = document
        for step in place[:-1]:
            inner = inner[step]
        del inner[place[-1]]

    return change


ATTN, GDN = ("kv_caches", "l.3.attn"), ("kv_caches", "l.0.gdn")

WRONG = {
    "no version": (_drop("kvreg_snapshot"), "$", "lacks kvreg_snapshot"),
    "another format": (_set("kvreg_snapshot", value=2), "$.kvreg_snapshot", "is 2, must be 1"),
    "no engine version": (_drop("engine", "version"), "$.engine", "lacks version"),
    "groups that are no list": (_set("groups", value={}), "$.groups", "is object, must be array"),
    "a group without spec": (_drop("groups", 0, "spec"), "$.groups[0]", "must have one of spec or specs"),
    "a group with both": (_set("groups", 0, "specs", value={}), "$.groups[0]", "not both"),
    "an unknown kind": (_set("groups", 1, "spec", "kind", value="magic"), "$.groups[1].spec.kind", "is 'magic', must be"),
    "a block of nothing": (_set("groups", 0, "spec", "block_size", value=0), "$.groups[0].spec.block_size", "is 0, must be at least 1"),
    "a block of everything": (_set("groups", 0, "spec", "block_size", value=2**40), "$.groups[0].spec.block_size", "at most 16777216"),
    "a state of no size": (_set("groups", 0, "spec", "tokens_per_state", value="1/0"), "$.groups[0].spec.tokens_per_state", "'1/0'"),
    "a state of huge size": (
        _set("groups", 0, "spec", "tokens_per_state", value="1e999999999"),
        "$.groups[0].spec.tokens_per_state",
        "p/q",
    ),
    "a number as text": (_set("groups", 0, "num_blocks", value="6"), "$.groups[0].num_blocks", "is string, must be integer"),
    "a number as fraction": (_set("groups", 0, "num_blocks", value=6.0), "$.groups[0].num_blocks", "is a fraction, must be integer"),
    "a truth as number": (_set("groups", 0, "num_blocks", value=True), "$.groups[0].num_blocks", "is boolean, must be integer"),
    "not a number": (_set("groups", 0, "num_blocks", value=float("nan")), "$.groups[0].num_blocks", "is nan"),
    "no end": (_set("groups", 0, "spec", "note", value=float("inf")), "$.groups[0].spec.note", "is inf"),
    "a number beyond exact": (_set("storages", "s0", "nbytes", value=2**53 + 1), "$.storages.s0.nbytes", "is larger than"),
    "a number beyond printing": (_set("storages", "s0", "nbytes", value=10**3000), "$.storages.s0.nbytes", "is larger than"),
    "a negative stride": (_set(*ATTN, "stride", 1, value=-4), "$.kv_caches['l.3.attn'].stride[1]", "is -4, must be at least 0"),
    "a negative stride in a list": (_set(*GDN, 1, "stride", 2, value=-1), "$.kv_caches['l.0.gdn'][1].stride[2]", "is -1"),
    "a cache of another type": (_set(*ATTN, value=5), "$.kv_caches['l.3.attn']", "is integer, must be object or array"),
    "a cache of nothing": (_set(*GDN, value=[]), "$.kv_caches['l.0.gdn']", "lists no tensor"),
    "a list in a list": (_set(*GDN, 0, value=[]), "$.kv_caches['l.0.gdn'][0]", "is array, must be object"),
    "no dtype": (_drop(*ATTN, "dtype"), "$.kv_caches['l.3.attn']", "lacks dtype"),
    "a dtype of nobody": (_set(*ATTN, "dtype", value="float7"), "$.kv_caches['l.3.attn'].dtype", "no dtype of torch"),
    "a word of torch that is no dtype": (_set(*ATTN, "dtype", value="nn"), "$.kv_caches['l.3.attn'].dtype", "no dtype of torch"),
    "a missing storage": (_set(*ATTN, "storage", value="s9"), "$.kv_caches['l.3.attn'].storage", "is 's9', which is not in $.storages"),
    "a stride too few": (_drop(*ATTN, "stride", 0), "$.kv_caches['l.3.attn'].stride", "has 3 entries for a shape of 4"),
    "no dimension": (_set(*GDN, 0, "shape", value=[]), "$.kv_caches['l.0.gdn'][0].shape", "has no dimension"),
    "more bytes than exist": (_set(*ATTN, "shape", 0, value=2**50), "$.kv_caches['l.3.attn'].shape", "spans more than"),
    "more elements than exist": (
        _set(*ATTN, value={"storage": "s0", "dtype": "int8", "shape": [2**40, 2**40], "stride": [0, 0], "storage_offset": 0}),
        "$.kv_caches['l.3.attn'].shape",
        "spans more than",
    ),
    "a name that moves the cursor": (_set("kv_caches", "\x1b[2J\n", value=5), r"$.kv_caches['\x1b[2J\n']", "is integer"),
    "a list without end": (_set(*ATTN, "shape", value=[1] * 20_000), "$.kv_caches['l.3.attn'].shape", "has 20000 members"),
}


@pytest.mark.parametrize(("change", "json_path", "problem"), WRONG.values(), ids=WRONG)
def test_a_snapshot_that_is_wrong_is_refused_with_its_place(
    change: Callable[[Document], None], json_path: str, problem: str, tmp_path: Path
) -> None:
    """The message names the file, the place in it and what is wrong there, in one line."""
    document = json.loads(LISTED.read_text())
    change(document)
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(document))
    with pytest.raises(SnapshotInvalid) as caught:
        snapshot.read(path)
    assert (caught.value.path, caught.value.json_path) == (str(path), json_path)
    assert problem in caught.value.problem
    assert str(caught.value).startswith(f"{path}: {json_path}: ")
    assert len(str(caught.value).splitlines()) == 1


GARBAGE = {
    "nothing": (b"", "is not JSON"),
    "half a snapshot": (b'{"kvreg_snapshot": 1, "engine":', "is not JSON: Expecting value at line 1 column 32"),
    "words": (b"not a snapshot", "is not JSON"),
    "another list": (b"[1, 2, 3]", "is array, must be object"),
    "a number": (b"7", "is integer, must be object"),
    "null": (b"null", "is null, must be object"),
    "latin-1": ('{"kvreg_snapshot": "é"}'.encode("latin-1"), "is not UTF-8 text"),
    "binary": (bytes(range(256)) * 8, "is not UTF-8 text"),
    "10 MB of zeros": (bytes(10 * 2**20), "is larger than 8388608 bytes"),
    "8 MB of numbers": (b"[" + b"0," * (4 * 2**20 - 2) + b"0]", "members"),
    "8 MB of words": (b"x" * MAX_FILE_BYTES, "is not JSON"),
    "a pit": (b"[" * 500_000, "is nested deeper than 16 levels"),
    "a closed pit": (b'{"a":' * 400 + b"0" + b"}" * 400, "is nested deeper than 16 levels"),
    "a number of 10,000 digits": (b"1" * 10_000, "holds a number of thousands of digits"),
    "a key twice": (b'{"kvreg_snapshot": 1, "kvreg_snapshot": 1}', "comes more than once"),
}


@pytest.mark.parametrize(("content", "problem"), GARBAGE.values(), ids=GARBAGE)
def test_a_file_that_is_no_snapshot_is_said_to_be_none(content: bytes, problem: str, tmp_path: Path) -> None:
    """Whatever the file holds, the answer is one line, and it comes without much memory."""
    path = tmp_path / "garbage"
    path.write_bytes(content)
    with pytest.raises(SnapshotInvalid) as caught:
        snapshot.read(path)
    assert (caught.value.path, caught.value.problem.count(str(path))) == (str(path), 0)
    assert problem in caught.value.problem
    assert len(str(caught.value).splitlines()) == 1
    assert len(caught.value.problem) < 200


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def any_content(draw: st.DrawFn) -> bytes:
    """Any bytes; any JSON; a snapshot with any JSON somewhere in it, or with some of its bytes overwritten, cut out or repeated."""
    whole = LISTED.read_bytes()
    match draw(st.sampled_from(("bytes", "json", "grafted", "spoilt"))):
        case "bytes":
            return draw(st.binary(max_size=200))
        case "json":
            return json.dumps(draw(ANY_JSON)).encode("utf-8", "surrogatepass")
        case "grafted":
            document = inner = json.loads(whole)
            while True:
                key = draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner))))
                if not inner[key] or not isinstance(inner[key], dict | list) or draw(st.booleans()):
                    inner[key] = draw(ANY_JSON)
                    return json.dumps(document).encode("utf-8", "surrogatepass")
                inner = inner[key]
        case _:
            start = draw(st.integers(0, len(whole) - 1))
            end = draw(st.integers(start, min(start + 40, len(whole))))
            return (
                whole[:start]
                + draw(st.sampled_from((b"", whole[start:end] * 2, b"9" * 400, b"[" * 30)) | st.binary(max_size=8))
                + whole[end:]
            )


@settings(max_examples=60)
@given(any_content())
def test_whatever_a_file_holds_it_is_a_registration_or_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """A stranger's file is read or refused: no traceback, no second line."""
    path = tmp_path_factory.mktemp("any") / "any.json"
    path.write_bytes(content)
    said = ""
    try:
        check(snapshot.read(path))
    except SnapshotInvalid as error:
        said = str(error)
    assert said == "" or said.startswith(f"{path}: $")
    assert len(said.splitlines()) <= 1
    assert len(said) < 300 + len(str(path))


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    """A wrong path and a directory are told from a wrong snapshot."""
    for path, problem in ((tmp_path / "nowhere", "No such file"), (tmp_path, "Is a directory"), (tmp_path / "a\0b", "null byte")):
        with pytest.raises(SnapshotInvalid, match="cannot be read") as caught:
            snapshot.read(path)
        assert problem in caught.value.problem


def test_a_file_that_may_not_be_read_is_said_to_be_forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing permission is told by its name."""

    def forbidden(path: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", forbidden)  # the superuser, who runs tests in containers, may read every file
    with pytest.raises(SnapshotInvalid, match="cannot be read: Permission denied"):
        snapshot.read(tmp_path / "closed.json")


def test_an_invalid_snapshot_survives_pickling() -> None:
    """The error can cross a process boundary, and is one of kvreg's own."""
    error = SnapshotInvalid("file", "$.groups", "is wrong")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.json_path) == (SnapshotInvalid, "file: $.groups: is wrong", "$.groups")
    assert isinstance(again, KVRegError)
    assert isinstance(again, ValueError)
