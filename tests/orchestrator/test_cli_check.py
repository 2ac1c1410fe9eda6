"""`kvreg check` as a user runs it: what it prints, how it exits, and what it never loads."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import screen
from orchestrator.check import Accepted, Rejected, check, document
from orchestrator.cli import main
from orchestrator.snapshot import read
from stages.errors import SnapshotInvalid

CASES = Path(__file__).parent.parent / "cases"
GOOD = CASES / "0.33.0-LBNHC-qwen3-5-0-8b-flashinfer.json"
LISTED = CASES / "0.26.0-NHD-qwen3-5-0-8b-flashinfer.json"
REFUSED = CASES / "refuse-026-padding-between-kernel-pages.json"
CHUNK = CASES / "refuse-033-chunk-not-a-multiple-of-544.json"


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 100 columns, whatever the tests run in."""
    monkeypatch.setenv("COLUMNS", "100")


def kvreg(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of the command."""
    monkeypatch.setattr(sys, "argv", ["kvreg", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    code = ended.value.code
    assert code is None or isinstance(code, int)
    return code or 0, out, err


# -------------------------------------------------------------------------------------------------------------- the contract


def test_each_snapshot_is_one_line_of_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A program reads the answer line by line, in the order it asked, and finds exactly the fields it was promised."""
    status, out, err = kvreg(monkeypatch, capsys, "check", "--json", GOOD, REFUSED, LISTED)
    answers = [json.loads(line) for line in out.splitlines()]
    assert (status, err) == (1, "")
    assert [(answer["snapshot"], answer["outcome"]) for answer in answers] == [
        (str(GOOD), "accepted"),
        (str(REFUSED), "rejected"),
        (str(LISTED), "accepted"),
    ]
    for answer in answers:
        assert list(answer) == ["snapshot", "outcome", "layers", "groups", "rejections"]
    accepted, rejected = answers[0], answers[1]
    assert {tuple(layer) for layer in accepted["layers"]} == {("name", "group", "disposition", "exclusion", "rule", "view")}
    assert {tuple(layer["view"]) for layer in accepted["layers"]} == {("dtype", "shape", "stride", "storage_offset", "block_dim")}
    assert {tuple(group) for group in accepted["groups"]} == {
        (
            *("engine_group_id", "layer_names", "tokens_per_block", "slots_per_block", "block_bytes"),
            *("block_stride_bytes", "sw_size_tokens", "recurrent_state", "opaque"),
        )
    }
    assert rejected["layers"] == rejected["groups"] == accepted["rejections"] == []
    assert [tuple(rejection) for rejection in rejected["rejections"]] == [
        ("stage", "reason", "rule", "group", "layer_names", "facts", "message", "hint")
    ]
    assert rejected["rejections"][0]["layer_names"] == ["l.3.attn"]
    assert rejected["rejections"][0]["facts"] == {"pages_per_block": 17, "runs": 17}


def test_layers_are_answered_in_registration_order_with_those_left_out() -> None:
    """Every cache of the registration is accounted for: registered under a group, or excluded and why."""
    for case in ("0.33.0-LBNHC-*.json", "0.29.0-BLHNC-*.json"):
        for path in sorted(CASES.glob(case)):
            if path.name.endswith(".expect.json"):
                continue
            offer = read(path)
            verdict = check(offer)
            if isinstance(verdict, Accepted):
                layers = document(str(path), verdict)["layers"]
                assert [layer["name"] for layer in layers if layer["name"] in offer.caches] == list(offer.caches)
                assert all((layer["view"] is None) == (layer["disposition"] == "excluded") == bool(layer["exclusion"]) for layer in layers)


@pytest.mark.parametrize(("snapshots", "status"), [([GOOD, LISTED], 0), ([GOOD, REFUSED], 1), ([REFUSED], 1)])
def test_the_exit_status_says_whether_all_would_register(
    snapshots: Sequence[Path], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A deployment script needs no more than the exit status, with and without --json."""
    assert kvreg(monkeypatch, capsys, "check", *snapshots)[0] == status
    assert kvreg(monkeypatch, capsys, "check", "--json", *snapshots)[0] == status


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "json"])
def test_an_unusable_file_is_one_line_and_nothing_else(
    form: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of many files the bad ones are named, each in a line with the place in it, and no answer could be taken for complete."""
    broken = json.loads(GOOD.read_text())
    broken["kv_caches"]["l.3.attn"]["stride"][1] = -1
    (tmp_path / "broken.json").write_text(json.dumps(broken))
    (tmp_path / "garbage.json").write_bytes(bytes(10 * 2**20))
    status, out, err = kvreg(monkeypatch, capsys, "check", *form, GOOD, tmp_path / "broken.json", REFUSED, tmp_path / "garbage.json")
    assert (status, out) == (2, "")
    assert err.splitlines() == [
        f"{tmp_path}/broken.json: $.kv_caches['l.3.attn'].stride[1]: is -1, must be at least 0",
        f"{tmp_path}/garbage.json: $: is larger than 8388608 bytes",
    ]


def test_a_missing_file_ends_in_one_line_as_the_user_sees_it(tmp_path: Path) -> None:
    """The real command, in a process of its own: exit status 2, one line, no traceback."""
    command = [sys.executable, "-m", "orchestrator.cli", "check", "nowhere.json"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env={"PYTHONPATH": str(CASES.parent.parent), "LANG": "C"}
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "nowhere.json: $: cannot be read: No such file or directory\n")


def test_neither_engine_nor_server_is_imported(tmp_path: Path) -> None:
    """A laptop without vLLM and LMCache checks snapshots; where they are installed, none of their code runs."""
    program = """
import sys

class Closed:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"vllm", "lmcache"}:
            raise AssertionError(f"kvreg check imports {name}")

sys.meta_path.insert(0, Closed())
from orchestrator.cli import main
sys.argv = ["kvreg", "check", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    loaded = {name.partition(".")[0] for name in sys.modules} & {"vllm", "lmcache"}
    sys.exit(f"loaded {loaded}" if loaded else ended.code)
"""
    command = [sys.executable, "-c", program, str(GOOD), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env={"PYTHONPATH": str(CASES.parent.parent)})
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["outcome"] == "accepted"


# ----------------------------------------------------------------------------------------------------- what a person reads


def test_an_accepted_registration_is_a_table_of_groups_and_layers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A person sees which groups there are, which rule edited which layers, and how they will be transferred."""
    status, out, err = kvreg(monkeypatch, capsys, "check", LISTED)
    assert (status, err) == (0, "")
    assert "✓ accepted" in out
    assert "vllm 0.26.0" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["3", "2", "full", "6", "544", "544", "1,114,112", "1,114,112", "all", "slots"] in rows
    assert ["0", "l.0.gdn,", "l.4.gdn", "bf16", "[6,3,6144]", "mamba-page-view", "int8", "[6,544,1,2000]"] in rows
    assert ["3", "l.3.attn,", "l.7.attn", "bf16", "[102,2,32,512]", "subpaged-attention-view", "bf16", "[6,2,544,512]"] in rows


def test_layers_of_one_geometry_are_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A model of a hundred layers is as short to read as one of two."""
    (tmp_path / "deep.json").write_text(json.dumps(dense(layers=100)))
    status, out, _ = kvreg(monkeypatch, capsys, "check", tmp_path / "deep.json")
    assert status == 0
    assert "l.0 … l.99 (100)" in out
    assert len(out.splitlines()) < 20


def test_a_refusal_says_who_why_and_the_way_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An operator reads stage, reason, rule, group, layers, facts and hint, and groups refused for one reason once."""
    status, out, _ = kvreg(monkeypatch, capsys, "check", REFUSED, CHUNK)
    assert status == 1
    for word in (
        "✗ rejected",
        "edit: padded_kernel_pages",
        "subpaged-attention-view",
        "group 3: l.3.attn",
        "runs 17",
        "set --block-size to",
    ):
        assert word in out, word
    assert out.count("validate: chunk_size") == 1
    assert all(f"group {group}: " in out for group in range(4))
    assert out.count("set LMCache's chunk size to 544 tokens or a multiple of it") == 1
    assert "2 snapshots: 0 accepted, 2 rejected" in out


def test_no_line_is_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables of every release, with every kind of layer, fit 100 columns."""
    paths = [path for path in sorted(CASES.glob("*.json")) if not path.name.endswith(".expect.json")][::9]
    _, out, _ = kvreg(monkeypatch, capsys, "check", *paths)
    assert max(map(len, out.splitlines())) <= 100
    assert all(path.stem in out.replace("\n", "") for path in paths)


def test_layers_left_out_are_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A person sees that a layer is not transferred, and why, instead of missing it."""
    snapshot = dense(layers=2)
    snapshot["groups"].append(snapshot["groups"][0] | {"layer_names": ["scratch"], "transferable": False})
    snapshot["kv_caches"] |= {"scratch": snapshot["kv_caches"]["l.0"], "alias": snapshot["kv_caches"]["l.1"]}
    (tmp_path / "s.json").write_text(json.dumps(snapshot))
    status, out, _ = kvreg(monkeypatch, capsys, "check", tmp_path / "s.json")
    rows = [line.split() for line in out.splitlines()]
    assert status == 0
    assert ["1", "scratch", "not", "transferred:", "not", "transferable"] in rows
    assert ["-", "alias", "not", "transferred:", "shared"] in rows


def test_a_registration_of_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that holds no layer is accepted, and the table says that nothing is transferred."""
    (tmp_path / "s.json").write_text(json.dumps(dense(layers=0)))
    status, out, _ = kvreg(monkeypatch, capsys, "check", tmp_path / "s.json")
    assert (status, "nothing is transferred" in out) == (0, True)


def test_names_from_a_file_cannot_write_to_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A snapshot from a stranger moves no cursor and sets no title: what does not print is shown as its escape."""
    hostile = "\x1b]0;pwned\x07\x1b[2J[red]\r\n\udc80"
    snapshot = dense(layers=1)
    snapshot["model_name"] = hostile
    snapshot["groups"][0]["layer_names"] = [hostile]
    snapshot["kv_caches"] = {hostile: snapshot["kv_caches"]["l.0"], f"{hostile}2": {**snapshot["kv_caches"]["l.0"], "storage_offset": 1}}
    (tmp_path / "s.json").write_text(json.dumps(snapshot))
    status, out, err = kvreg(monkeypatch, capsys, "check", tmp_path / "s.json")
    assert (status, err) == (1, "")
    assert all(char.isprintable() or char == "\n" for char in out)
    assert r"\x1b[2J[red]\r\n\udc80" in out.replace("\n", "")


@given(data=st.data())
def test_no_change_to_a_snapshot_makes_the_check_stumble(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever is wrong with a registration, the answer is a verdict or an invalid snapshot: never a crash, never silence."""
    case = data.draw(st.sampled_from([GOOD, LISTED, REFUSED, CASES / "0.33.0-BLHNC-deepseek-v4-like-fp8-ds-mla.json"]))
    snapshot = json.loads(case.read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        _change(snapshot, data)
    path = tmp_path_factory.mktemp("changed") / "s.json"
    path.write_text(json.dumps(snapshot))
    try:
        verdict = check(read(path))
    except SnapshotInvalid:
        return
    answer = document(str(path), verdict)
    assert json.loads(json.dumps(answer))["outcome"] == ("accepted" if isinstance(verdict, Accepted) else "rejected")
    assert bool(answer["rejections"]) == isinstance(verdict, Rejected)
    screen.console().print(screen.verdict(str(path), verdict))


def _change(snapshot: Any, data: st.DataObject) -> None:
    """Walk to some value of the snapshot, and replace it by one of its kind or drop it."""
    inner = snapshot
    while True:
        key = data.draw(st.sampled_from(list(inner) if isinstance(inner, dict) else range(len(inner)))) if inner else None
        if key is None:
            return
        if not isinstance(inner[key], dict | list) or data.draw(st.integers(0, 9)) == 0:
            break
        inner = inner[key]
    match inner[key]:
        case bool(flag):
            inner[key] = not flag
        case int(number):
            near = st.sampled_from([number + 1, max(number - 1, 0), number * 2, number // 2, number * 3, number + 16])
            inner[key] = data.draw(near | st.sampled_from([0, 1, 2, 3, 2**20, 2**31, 2**52]))
        case str():
            words = ["mamba", "none", "all", "HND", "BLHNC", "int8", "float32", "1/3", "-1", "s0", "s1", "mla_attention", "sliding_window"]
            inner[key] = data.draw(st.sampled_from(words))
        case list(members):
            inner[key] = data.draw(st.sampled_from([members[1:], members[::-1], members * 2, []]))
        case _:
            del inner[key]


def dense(layers: int) -> dict[str, Any]:
    """The snapshot of a model of full attention, each layer's cache in a storage of its own."""
    names = [f"l.{index}" for index in range(layers)]
    spec = {"kind": "full_attention", "block_size": 16, "page_size_bytes": 16384, "num_states": 16, "unpadded_page_size_bytes": 16384}
    tensor = {"dtype": "bfloat16", "shape": [6, 16, 4, 128], "stride": [8192, 512, 128, 1], "storage_offset": 0}
    return {
        "kvreg_snapshot": 1,
        "engine": {"name": "engine", "version": "1"},
        "kv_layout": "NHD",
        "groups": [{"layer_names": names, "num_blocks": 6, "spec": spec}],
        "storages": {name: {"nbytes": 6 * 16384} for name in names},
        "kv_caches": {name: {"storage": name, **tensor} for name in names},
    }
