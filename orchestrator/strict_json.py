"""JSON that a stranger wrote, read within bounds: what is odd is refused with its place, and nothing large is built from it.

Python's parser takes NaN, repeated keys and numbers of any size, and says only a line and a column where it stops.
"""

import json
from collections import Counter
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import TypeAlias

from stages.errors import SnapshotInvalid

Place: TypeAlias = tuple[str | int, ...]
"""Keys and indices from the root to a value."""

MAX_FILE_BYTES = 8 * 2**20
"""A registration of a thousand layers is a tenth of this."""

MAX_MEMBERS = 10_000
MAX_DEPTH = 16
MAX_NUMBER = 2**53
"""The largest whole number that every JSON reader keeps exact."""


class _Object(dict[str, object]):
    """An object as parsed; `repeated` are keys that came more than once."""

    repeated: tuple[str, ...] = ()


def read_json(path: str) -> object:
    """The document in a file. Raises SnapshotInvalid: unreadable, not UTF-8, not JSON, too large, too deep, NaN, a repeated key."""
    text = _text(path)
    try:
        document = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as cause:
        raise SnapshotInvalid(path, "$", f"is not JSON: {cause.msg} at line {cause.lineno} column {cause.colno}") from cause
    except RecursionError as cause:
        raise SnapshotInvalid(path, "$", f"is nested deeper than {MAX_DEPTH} levels") from cause
    except ValueError as cause:  # Python's limit on the digits of a number
        raise SnapshotInvalid(path, "$", "holds a number of thousands of digits") from cause
    for place, problem in _oddities(document):
        raise SnapshotInvalid(path, json_path(place), problem)
    return document


def json_path(place: Place) -> str:
    """`$.kv_caches['l.0'].stride[1]`, on one line whatever the keys are."""
    return "$" + "".join(map(_step, place))


def _text(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as cause:
        raise SnapshotInvalid(path, "$", f"cannot be read: {cause.strerror}") from cause
    except ValueError as cause:  # a NUL in the file's name
        raise SnapshotInvalid(path, "$", f"cannot be read: {cause}") from cause
    if len(content) > MAX_FILE_BYTES:
        raise SnapshotInvalid(path, "$", f"is larger than {MAX_FILE_BYTES} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise SnapshotInvalid(path, "$", f"is not UTF-8 text: {cause.reason} at byte {cause.start}") from cause


def _object(pairs: list[tuple[str, object]]) -> _Object:
    members = _Object(pairs)
    if len(members) < len(pairs):
        members.repeated = tuple(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
    return members


def _oddities(document: object) -> Iterable[tuple[Place, str]]:
    """Where the document is not what the bounds allow. Walked with a list, not by recursion, which a deep one would exhaust."""
    pending: list[tuple[Place, object]] = [((), document)]
    while pending:
        place, value = pending.pop()
        match value:
            case _Object() if value.repeated:
                yield (*place, value.repeated[0]), "comes more than once in one object"
            case dict() | list() if len(value) > MAX_MEMBERS:
                yield place, f"has {len(value)} members, at most {MAX_MEMBERS} are read"
            case dict() | list() if len(place) >= MAX_DEPTH:
                yield place, f"is nested deeper than {MAX_DEPTH} levels"
            case dict():
                pending += [((*place, key), member) for key, member in value.items()]
            case list():
                pending += [((*place, index), member) for index, member in enumerate(value)]
            case float() if not isfinite(value):
                yield place, f"is {value}, must be a finite number"
            case int() if abs(value) > MAX_NUMBER:
                yield place, f"is larger than {MAX_NUMBER}"
            case _:
                pass


def _step(step: str | int) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    if step.isidentifier() and step.isascii():
        return f".{step}"
    return f"[{step if len(step) <= 80 else step[:77] + '...'!r}]"
