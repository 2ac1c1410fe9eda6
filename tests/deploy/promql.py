"""Every small mistake someone could make in an alert rule: the mutants of a rule, made from its PromQL's tokens."""

import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, TypeAlias

Rule: TypeAlias = dict[str, Any]

_TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<text>"[^"]*")|(?P<duration>\d+[smhd])|(?P<number>\d+(?:\.\d+)?)|(?P<name>[a-zA-Z_:][\w:]*)"""
    r"""|(?P<operator>[=!]~|[=!<>]=?|[-+*/])|(?P<mark>[(){}\[\],])"""
)
_OTHER_COMPARISONS = {"<": ("<=", ">="), ">": (">=", "<="), ">=": (">", "<"), "<=": ("<", ">"), "==": ("!=",), "!=": ("==",)}
_OTHER_SETS = {"and": ("unless", "or"), "or": ("and", "unless"), "unless": ("and", "or")}
_GROUPINGS = {"by", "without", "on", "ignoring"}


def tokens(expr: str) -> list[tuple[str, str]]:
    """A PromQL expression as (kind, text); raises ValueError where it holds something this does not know."""
    found, at = [], 0
    while at < len(expr):
        match = _TOKEN.match(expr, at)
        if not match or not match.lastgroup:
            raise ValueError(f"unknown PromQL at {expr[at : at + 20]!r}")
        found.append((match.lastgroup, match.group()))
        at = match.end()
    return found


def mutants(rule: Rule) -> Iterator[tuple[str, Rule]]:
    """Each rule that differs from `rule` by one threshold, duration, comparison, set operator, label, `for` or severity."""
    for what, expr in _expressions(rule["expr"]):
        yield what, {**deepcopy(rule), "expr": expr}
    if "alert" in rule:
        minutes = int(rule.get("for", "0m").removesuffix("m"))
        for other in {minutes + 1, max(minutes - 1, 0)} - {minutes}:
            yield f"for {minutes}m -> {other}m", {**deepcopy(rule), "for": f"{other}m"}
        for label, value in rule["labels"].items():
            yield f"label {label} dropped", {**deepcopy(rule), "labels": {k: v for k, v in rule["labels"].items() if k != label}}
            yield f"label {label} changed", {**deepcopy(rule), "labels": {**rule["labels"], label: value + "x"}}
        yield "alert renamed", {**deepcopy(rule), "alert": rule["alert"] + "x"}
        for name in rule["annotations"]:
            yield f"annotation {name} emptied", {**deepcopy(rule), "annotations": {**rule["annotations"], name: ""}}


def _expressions(expr: str) -> Iterator[tuple[str, str]]:
    parts = tokens(expr)
    within: list[str] = []
    opened_by = ""
    for at, (kind, text) in enumerate(parts):
        if text in ("(", "{", "["):
            within.append(opened_by if text == "(" else text)
        elif text in (")", "}", "]"):
            within.pop()
        place = within[-1] if within else ""
        changes: tuple[str, ...] = ()
        if kind == "number":
            changes = (str(int(text) + 1), str(int(text) - 1))
        elif kind == "duration":
            changes = _durations(text)
        elif place == "{" and kind == "text":
            changes = (text[:-1] + 'x"',)
        elif place == "{" and kind == "operator":
            changes = ({"=": "!=", "!=": "="}[text],)
        elif kind == "operator":
            changes = _OTHER_COMPARISONS.get(text, ())
        elif kind == "name" and text in _OTHER_SETS:
            changes = _OTHER_SETS[text]
        elif kind == "name" and place in _GROUPINGS:
            changes = ("",)
        for change in changes:
            yield f"{text} -> {change or 'dropped'} at {at}", _spell(parts, at, at + 1, change)
        if place == "{" and kind == "name":
            yield f"matcher {text} dropped at {at}", _spell(parts, at, at + 3, "")
        if kind == "name":
            opened_by = text
        elif kind != "space":
            opened_by = ""


def _durations(text: str) -> tuple[str, ...]:
    seconds = int(text[:-1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[text[-1]]
    return (f"{seconds + 60}s", f"{seconds - 60}s")


def _spell(parts: list[tuple[str, str]], start: int, end: int, change: str) -> str:
    expr = "".join(text for _, text in [*parts[:start], ("", change), *parts[end:]])
    # A dropped name leaves its comma behind.
    return re.sub(r",\s*(?=[)}])", "", re.sub(r"(?<=[({])\s*,\s*", "", re.sub(r",\s*,", ",", expr)))
