"""Errors as the person reads them: one line to the letter, with its parts as attributes, and whole after pickling."""

import pickle
from typing import Any

import pytest

from stages import errors
from stages.errors import (
    HINTS,
    EngineUnsupported,
    Facts,
    KVRegError,
    PreflightImpossible,
    Reason,
    RegistrationRejected,
    Rejection,
    RuleRejected,
    SnapshotInvalid,
    Stage,
    TransferRefused,
    TransferUnavailable,
)

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]

FACTS: Facts = {"words": "two\nlines\tof words", "sizes": (1, (2, 3)), "layout": None, "timeout_s": 1.5, "block_bytes": 17}
TOLD = "(words=two lines of words sizes=1,2,3 layout=None timeout_s=1.5 block_bytes=17)"

REFUSAL = Rejection(Stage.EDIT, Reason.WIDTH, "a-rule", 3, ("layers.0\n.attn", "layers.1.attn"), FACTS)
BARE = Rejection(Stage.VALIDATE, Reason.UNKNOWN_KIND)

WIDTH, UNKNOWN_KIND = HINTS[Reason.WIDTH], HINTS[Reason.UNKNOWN_KIND]
TIMEOUT = "the backend did not answer within 1.5 s: check that it is up, then raise kvreg.register_timeout_s"

SAID: list[tuple[KVRegError, str, dict[str, object]]] = [
    (
        RegistrationRejected((REFUSAL, BARE)),
        f"kvreg refused this registration: edit: rule a-rule: group 3: layers layers.0 .attn, layers.1.attn: width {TOLD}; "
        f"{WIDTH} (kvreg explain width) | validate: unknown_kind; {UNKNOWN_KIND} (kvreg explain unknown_kind)",
        {"rejections": (REFUSAL, BARE)},
    ),
    (
        TransferUnavailable(Reason.TRANSFER_TIMEOUT, FACTS),
        f"kvreg could not register: transfer-register: transfer_timeout {TOLD}; {TIMEOUT} (kvreg explain transfer_timeout)",
        {"reason": Reason.TRANSFER_TIMEOUT, "facts": FACTS},
    ),
    (
        TransferRefused(Reason.TRANSFER_REFUSED, {}),
        f"kvreg could not register: transfer-register: transfer_refused; {HINTS[Reason.TRANSFER_REFUSED]} (kvreg explain transfer_refused)",
        {"reason": Reason.TRANSFER_REFUSED, "facts": {}},
    ),
    (RuleRejected(Reason.WIDTH, FACTS), f"width {TOLD}", {"reason": Reason.WIDTH, "facts": FACTS}),
    (
        EngineUnsupported("vllm", "0.21", "kv_cache_interface\nof 0.22"),
        "kvreg cannot read vllm 0.21: it needs kv_cache_interface of 0.22",
        {"engine": "vllm", "version": "0.21", "needs": "kv_cache_interface\nof 0.22"},
    ),
    (
        PreflightImpossible("no such\narchitecture", "--model-impl"),
        "no such architecture (change --model-impl)",
        {"problem": "no such\narchitecture", "change": "--model-impl"},
    ),
    (PreflightImpossible("no such architecture", ""), "no such architecture", {"problem": "no such architecture", "change": ""}),
    (
        SnapshotInvalid("a folder/a\nfile.json", "$.kv_caches['l.0']", "is null"),
        "a folder/a file.json: $.kv_caches['l.0']: is null",
        {"path": "a folder/a\nfile.json", "json_path": "$.kv_caches['l.0']", "problem": "is null"},
    ),
]
"""Each error, its one line, and its parts."""

NAMES = [type(error).__name__ for error, *_ in SAID]


@pytest.mark.parametrize(("error", "line", "parts"), SAID, ids=NAMES)
def test_an_error_is_one_line(error: KVRegError, line: str, parts: dict[str, Any]) -> None:
    """Only `str(error)` crosses the engine's process boundary, into logs that are read by line: what, where, why and the way out."""
    assert str(error) == line
    assert line.splitlines() == [line]
    assert vars(error) == parts


@pytest.mark.parametrize(("error", "line", "parts"), SAID, ids=NAMES)
def test_an_error_is_the_same_after_pickling(error: KVRegError, line: str, parts: dict[str, Any]) -> None:
    """What a worker raises reaches another process whole: its class, its parts and its line."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (again.args, vars(again), str(again)) == (error.args, parts, line)


def test_every_error_is_tried_here() -> None:
    """An error class that is new is pickled and printed by the tests above too; those that only have children are not raised."""
    parents = {parent for child in CLASSES for parent in child.__bases__}
    assert set(CLASSES) - parents == {type(error) for error, *_ in SAID}


def test_a_long_list_of_layers_is_counted() -> None:
    """Four bad layers are four names, five are four and a number."""
    names = tuple(f"l.{index}" for index in range(100))
    assert Rejection(Stage.EDIT, Reason.WIDTH, layer_names=names[:4]).message == "edit: layers l.0, l.1, l.2, l.3: width"
    assert Rejection(Stage.EDIT, Reason.WIDTH, layer_names=names[:5]).message == "edit: layers l.0, l.1, l.2, l.3 and 1 more: width"
    assert Rejection(Stage.EDIT, Reason.WIDTH, layer_names=names).message == "edit: layers l.0, l.1, l.2, l.3 and 96 more: width"


def test_group_0_is_named() -> None:
    """The first group is a group like any other."""
    assert Rejection(Stage.EDIT, Reason.WIDTH, group=0).message == "edit: group 0: width"


def test_a_hint_fills_in_its_facts() -> None:
    """The way out names the operator's own numbers; one that was not given stays visible by its name."""
    said = Rejection(Stage.EDIT, Reason.UNKNOWN_LAYOUT, facts={"known": ("NHD", "HND")})
    assert said.hint == "set VLLM_KV_CACHE_LAYOUT to one of NHD,HND, or upgrade kvreg"
    assert Rejection(Stage.EDIT, Reason.UNKNOWN_LAYOUT).hint == "set VLLM_KV_CACHE_LAYOUT to one of <known>, or upgrade kvreg"


def test_an_error_knows_whether_trying_again_helps() -> None:
    """Recovery asks the error, and only an unavailable backend is worth another try."""
    assert [type(error) for error, *_ in SAID if error.retryable] == [TransferUnavailable]
