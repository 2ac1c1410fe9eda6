"""Serving without the external cache after a refusal: what scheduler and workers tell each other, and say meanwhile.

A worker that is refused says so in its handshake, which vLLM hands to the scheduler before the first step. The
scheduler then looks nothing up, and says so to every worker in each step's metadata, so that one that was not refused
does not report requests that the scheduler never gave it.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, TypeVar

from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

_log = logging.getLogger("kvreg.bypass")

REMIND_EVERY_S = 60.0

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Handshake(KVConnectorHandshakeMetadata):
    """From a worker to the scheduler, once: why this worker was refused, None if it registered."""

    refusal: str | None


class Metadata(LMCacheMPConnectorMetadata):
    """From the scheduler to the workers, each step while bypassed: no request, and why."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why


class Bypass:
    """An engine that serves without the external cache; says why at once, and then at most once a minute."""

    def __init__(self, why: str) -> None:
        self.why = why
        self._said_at = 0.0
        self.remind()

    def remind(self) -> None:
        """Log the reason if the last time was a minute ago."""
        now = time.monotonic()
        if self._said_at == 0.0 or now - self._said_at >= REMIND_EVERY_S:
            self._said_at = now
            _log.error("kvreg: bypassed, the engine serves without the external cache: %s", self.why)


def unless_bypassed(
    method: Callable[Concatenate[Any, Parameters], Result], idle: Callable[[], Result]
) -> Callable[Concatenate[Any, Parameters], Result]:
    """The connector's method, or `idle()` while the connector's `bypass` is set."""

    def either(self: Any, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return idle() if self.bypass else method(self, *args, **kwargs)

    return update_wrapper(either, method)
