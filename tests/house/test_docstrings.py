"""Public things say what they are for, and a test says what it promises."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ROOMS = ("orchestrator", "metrics", "stages")

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def public(node: ast.Module | ast.ClassDef, where: str) -> Iterator[tuple[str, Documented]]:
    """A module or class and all that is public in it, by dotted name."""
    yield where, node
    for child in node.body:
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from public(child, f"{where}.{child.name}")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            yield f"{where}.{child.name}", child


@pytest.mark.parametrize("room", ROOMS)
def test_whatever_is_public_says_what_it_is_for(room: str) -> None:
    """Each module, class, function and method that others use begins with a sentence, and a sentence ends."""
    named = [found for path in modules(room) for found in public(ast.parse(path.read_text()), str(path.relative_to(ROOT)))]
    sentences = {where: (ast.get_docstring(node) or "").split("\n\n")[0] for where, node in named}
    assert len(sentences) > len(modules(room)) > 0
    assert {where: text for where, text in sentences.items() if not text.rstrip("\n").endswith((".", ":"))} == {}


def test_every_test_says_what_a_user_would_say() -> None:
    """A test that fails is read by its sentence before its code."""
    tests = [
        (f"{path.relative_to(ROOT)}::{node.name}", ast.get_docstring(node))
        for path in modules("tests")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    assert len(tests) > 50
    assert [where for where, sentence in tests if not sentence] == []
