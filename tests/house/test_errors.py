"""The tables of refusals and the code that gives them: each reason has a hint, each hint its facts, each stage its reasons."""

import ast
import re
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages import errors
from stages.errors import HINTS, REASONS, KVRegError, Reason, Rejection, Stage

ROOT = Path(__file__).parent.parent.parent
ROOMS = ("orchestrator", "metrics", "stages")

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]


def raise_sites() -> Iterator[tuple[str, Reason, set[str], bool]]:
    """Every call in the rooms that names a reason: where, the reason, the names of its facts, and whether those are all.

    They are not where a call passes facts on (`**facts`, or a name): what is missing there was given before.
    """
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            reasons = [argument.attr for argument in node.args if is_reason(argument)] if isinstance(node, ast.Call) else []
            if isinstance(node, ast.Call) and reasons:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", Reason[reasons[0]], *fact_names(node)


def is_reason(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Reason"


def fact_names(call: ast.Call) -> tuple[set[str], bool]:
    """Names of the facts that a call gives, by keyword or in a dict, and whether it passes on no others."""
    keywords = [keyword.arg for keyword in call.keywords if keyword.arg != "facts"]
    values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "facts")]
    keys = [key.value if isinstance(key, ast.Constant) else None for value in values if isinstance(value, ast.Dict) for key in value.keys]
    passed_on = any(isinstance(value, ast.Name) and value.id == "facts" for value in values)
    names = [*keywords, *keys]
    return {str(name) for name in names if name is not None}, None not in names and not passed_on


def placeholders(reason: Reason) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(HINTS[reason]) if name}


def test_every_reason_has_a_hint() -> None:
    """Whatever is refused, there is one sentence on what to do about it."""
    assert set(HINTS) == set(Reason)
    assert all(hint.strip() == hint and hint[-1:] not in {"", "."} for hint in HINTS.values())


def test_every_hint_is_given_the_facts_it_names() -> None:
    """No operator reads `<smallest_valid_chunk_tokens>`: where a reason is raised, its hint's facts are there."""
    sites = [(where, reason, placeholders(reason) - names, complete) for where, reason, names, complete in raise_sites()]
    assert [(where, str(reason), missing) for where, reason, missing, complete in sites if missing and complete] == []
    assert {reason for _, reason, missing, _ in sites if not missing} == set(Reason) & {reason for _, reason, _, _ in sites}


def test_every_reason_is_raised_somewhere() -> None:
    """The closed list holds no cause that cannot happen."""
    named = set()
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py") if path.name != "errors.py"):
        named |= set(re.findall(r"\bReason\.([A-Z_]+)\b", path.read_text(encoding="utf-8")))
    assert {reason.name for reason in Reason} - named == set()


GIVEN_BY = {
    Stage.VALIDATE: ("stages/validate.py", "stages/geometry.py"),
    Stage.EDIT: ("stages/edit.py", "stages/pages.py", "stages/proof.py", "stages/rules/*.py"),
    Stage.ENGINE_GROUP_INFO: ("stages/engine_groups.py",),
    Stage.TRANSFER_REGISTER: ("stages/transfer.py", "orchestrator/*.py", "orchestrator/backend/*.py", "orchestrator/connector/*.py"),
}
"""Where each stage's refusals are raised; `orchestrator/explain.py` only speaks of them."""


@pytest.mark.parametrize("stage", Stage)
def test_a_reason_is_given_only_where_its_stage_may_give_it(stage: Stage) -> None:
    """An alert on any reason of any stage has a series, and no series waits for what cannot happen."""
    files = [path for pattern in GIVEN_BY[stage] for path in ROOT.glob(pattern) if path.name != "explain.py"]
    given = {name for path in files for name in re.findall(r"\bReason\.([A-Z_]+)\b", path.read_text(encoding="utf-8"))}
    assert files
    assert given == {reason.name for reason in REASONS[stage]}


@pytest.mark.parametrize("reason", Reason)
def test_a_hint_formats_with_any_facts(reason: Reason) -> None:
    """A refusal is reported with its hint even if its facts are not those the hint names."""
    rejection = Rejection(Stage.EDIT, reason, facts=dict.fromkeys(placeholders(reason), ("one", "two")))
    assert "one,two" in rejection.hint or not placeholders(reason)
    assert Rejection(Stage.EDIT, reason).hint


def test_the_tree_draws_every_error_under_its_parent() -> None:
    """The docstring is the map: every class of the module is in it, below the class it derives from."""
    drawn = re.findall(r"^ {4}([ │├└─]*)([A-Z]\w+)", errors.__doc__ or "", flags=re.MULTILINE)
    parent_at: dict[int, str] = {}
    parents: dict[str, str | None] = {}
    for indent, name in drawn:
        depth = len(indent) // 4
        parents[name] = parent_at.get(depth - 1)
        parent_at[depth] = name
    assert parents == {error.__name__: error.__bases__[0].__name__ if error is not KVRegError else None for error in CLASSES}
