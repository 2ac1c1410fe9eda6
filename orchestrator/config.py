"""kvreg's own settings, read once from the connector's extra config and then passed by hand.

Keys start with `kvreg.`; every other key is LMCache's and left alone. An unknown key is refused: a setting that does
nothing is worse than an engine that does not start.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any

from stages.errors import KVRegError

PREFIX = "kvreg."


class OnRefusal(StrEnum):
    """What a refused registration does to the engine: stop it, or let it serve without the external cache."""

    STOP = "stop"
    BYPASS = "bypass"


class LogFormat(StrEnum):
    """How events are written to the log."""

    JSON = "json"
    TEXT = "text"


class ConfigError(KVRegError, ValueError):
    """Settings that cannot be used; `problems` has one sentence for each."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return "kvreg cannot use its settings: " + "; ".join(self.problems)


@dataclass(frozen=True, slots=True)
class KVRegConfig:
    """Every setting; the key of `on_refusal` is `kvreg.on_refusal`, and so on."""

    on_refusal: OnRefusal = OnRefusal.STOP
    register_timeout_s: float = 300.0
    """Seconds a registration, and before it the wait for a server that is not up yet, may take."""
    snapshot_dir: Path | None = None
    """Where to keep a snapshot of every registration; None keeps none."""
    snapshot_limit: int = 16
    """How many snapshots `snapshot_dir` holds at most; the oldest go first."""
    ledger_dir: Path | None = None
    """Where to keep the counters that outlive the engine; None keeps none."""
    instance: str | None = None
    """This engine's name in the ledger's file names; None takes the host's name."""
    log_format: LogFormat = LogFormat.JSON

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any]) -> "KVRegConfig":
        """The settings in a connector's extra config. Raises ConfigError naming every wrong key and value at once."""
        problems: list[str] = []
        values: dict[str, Any] = {}
        for key, value in extra_config.items():
            if not key.startswith(PREFIX.rstrip(".")):
                continue
            parse = _PARSERS.get(key)
            if parse is None:
                problems.append(_unknown(key))
                continue
            try:
                values[key.removeprefix(PREFIX)] = parse(value)
            except ValueError as wrong:
                problems.append(f"{key} must be {wrong}, not {value!r}")
        if problems:
            raise ConfigError(tuple(problems))
        return cls(**values)


def _unknown(key: str) -> str:
    """The sentence for a key that is no setting, with the nearest that is."""
    nearest = get_close_matches(key, _PARSERS, n=1, cutoff=0.0)[0]
    return f"{key} is no setting: did you mean {nearest}?"


def _one_of(choices: type[StrEnum]) -> Callable[[Any], StrEnum]:
    def parse(value: Any) -> StrEnum:
        if value not in tuple(choices):
            raise ValueError(" or ".join(choices))
        return choices(value)

    return parse


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        raise ValueError("a number of seconds above 0")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("a whole number above 0")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text that is not empty")
    return value


def _path(value: Any) -> Path:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a path")
    return Path(value).expanduser()


_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "kvreg.on_refusal": _one_of(OnRefusal),
    "kvreg.register_timeout_s": _seconds,
    "kvreg.snapshot_dir": _path,
    "kvreg.snapshot_limit": _count,
    "kvreg.ledger_dir": _path,
    "kvreg.instance": _text,
    "kvreg.log_format": _one_of(LogFormat),
}

SETTINGS = tuple(PREFIX + field.name for field in fields(KVRegConfig))
"""Every key, in the order of the dataclass."""

assert set(SETTINGS) == set(_PARSERS)
