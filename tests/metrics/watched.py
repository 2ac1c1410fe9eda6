"""Registrations through the real pipeline, watched: small offers, a small typed backend, and counts read by name and labels."""

import logging
from collections.abc import Callable, Sequence

import anyio
from prometheus_client import CollectorRegistry

from metrics.observer import Observer
from orchestrator.pipeline import Settings, register, register_all
from stages.errors import KVRegError
from stages.model import Offer, Plan, Receipt
from stages.rules import RULES, Rule


class Accepting:
    """A backend that takes every plan, or fails with what `error` makes."""

    name = "accepting"

    def __init__(self, error: Callable[[], BaseException] | None = None) -> None:
        self.error = error

    async def register(self, plan: Plan) -> str:
        if self.error:
            raise self.error()
        return "plan-1"

    async def unregister(self, plan: Plan) -> None: ...


class Stuck(Accepting):
    """A backend that never answers; `asked` is called once it is."""

    def __init__(self, asked: Callable[[], None]) -> None:
        super().__init__()
        self.asked = asked

    async def register(self, plan: Plan) -> str:
        self.asked()
        await anyio.sleep_forever()
        raise AssertionError("sleep_forever returned")


class Lines(logging.Handler):
    """A handler that keeps each record's line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def run(
    offer: Offer, observers: Sequence[Observer], backend: Accepting | None = None, rules: tuple[Rule, ...] = RULES
) -> Receipt | KVRegError:
    """One registration, to its receipt or the error it raised."""

    async def main() -> Receipt | KVRegError:
        try:
            return await register(offer, backend or Accepting(), Settings(observers=observers, rules=rules))
        except KVRegError as error:
            return error

    return anyio.run(main)


def run_cancelled(offer: Offer, observers: Sequence[Observer]) -> None:
    """One registration that is cancelled while the backend is asked."""

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            backend = Stuck(tasks.cancel_scope.cancel)
            tasks.start_soon(register, offer, backend, Settings(observers=observers))

    anyio.run(main)


def run_together(offers: Sequence[Offer], observers: Sequence[Observer]) -> None:
    """Many registrations in one task group."""
    named = {str(offer.worker.rank): offer for offer in offers}
    anyio.run(register_all, named, dict.fromkeys(named, Accepting()), Settings(observers=observers))


def nonzero(registry: CollectorRegistry, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """The samples of a name that are not zero, by these labels' values."""
    samples = [sample for family in registry.collect() for sample in family.samples if sample.name == name and sample.value]
    found = {tuple(sample.labels[label] for label in labels): sample.value for sample in samples}
    assert len(found) == len(samples), "these labels do not tell the samples apart"
    return found
