"""vLLM's own complaints as one readable line, with the flag to change."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from stages.errors import KVRegError, PreflightImpossible

_FLAG = re.compile(r"--[a-z][a-z0-9-]+")

_COMMAND = re.compile(r"`[^`]*`")
"""A command that a message advises; its flags are not the engine's."""

_SENTENCE_CHARACTERS = 400


@contextmanager
def refused() -> Iterator[None]:
    """Within, whatever vLLM raises becomes PreflightImpossible: what it says, and the flag that it names or that decides it."""
    try:
        yield
    except KVRegError:
        raise
    except Exception as error:
        raise PreflightImpossible(_said(error), _flag(error)) from error


def _said(error: Exception) -> str:
    """The first sentence or two of what went wrong, without pydantic's frame or vLLM's advice to read its log."""
    said = " ".join(_problems(error)) or str(error)
    if isinstance(error, KeyError | AttributeError):
        said = f"the model's config.json lacks what its architecture needs: {said}"
    elif isinstance(error, AssertionError) and not said:
        said = f"vLLM asserts otherwise, in {_place(error)}"
    said = " ".join(said.split())
    return said if len(said) <= _SENTENCE_CHARACTERS else said[: _SENTENCE_CHARACTERS - 1] + "…"


def _problems(error: Exception) -> list[str]:
    """The messages of a pydantic ValidationError; none of anything else."""
    problems = getattr(error, "errors", None)
    if not callable(problems):
        return []
    return [f"{'.'.join(map(str, each.get('loc', ())))} {each['msg'].removeprefix('Value error, ')}".strip() for each in problems()]


def _flag(error: Exception) -> str:
    """The flag that vLLM names in its message, or that spells a configuration field which is wrong; "" if it says neither."""
    named = _FLAG.search(_COMMAND.sub("", str(error)))
    if named:
        return named.group()
    problems = getattr(error, "errors", None)
    fields = [str(part) for each in problems() for part in each.get("loc", ())] if callable(problems) else []
    return f"--{fields[-1].replace('_', '-')}" if fields else ""


def _place(error: Exception) -> str:
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return "an unknown place" if frame is None else f"{frame.tb_frame.f_globals.get('__name__')}:{frame.tb_lineno}"
