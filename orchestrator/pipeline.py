"""A registration on one screen: validate → edit → engine-group-info → transfer-register, observed at every arrow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import uuid4

import anyio

from metrics.observer import Observer, Run
from orchestrator.watch import Watch
from stages.edit import edit
from stages.engine_groups import engine_groups
from stages.errors import KVRegError, Stage
from stages.model import Offer, Receipt
from stages.rules import RULES, Rule
from stages.transfer import TransferBackend, transfer
from stages.validate import validate


@dataclass(frozen=True, slots=True)
class Settings:
    """How registrations run: who watches, by which rules, and how long a backend may take."""

    observers: Sequence[Observer] = ()
    rules: tuple[Rule, ...] = RULES
    register_timeout_s: float = 300.0
    role: str = "worker"


async def register(offer: Offer, backend: TransferBackend, settings: Settings | None = None) -> Receipt:
    """Take one worker's offer to a receipt. Raises RegistrationRejected or TransferError; then nothing is registered."""
    settings = settings or Settings()
    run = Run(uuid4().hex, offer.model_name, settings.role, str(offer.worker.rank))
    async with Watch(run, settings.observers) as watch:
        validated = await watch.stage(Stage.VALIDATE, lambda: validate(offer))
        edited = await watch.stage(Stage.EDIT, lambda: edit(validated, settings.rules))
        plan = await watch.stage(Stage.ENGINE_GROUP_INFO, lambda: engine_groups(edited))
        return await watch.waiting_stage(Stage.TRANSFER_REGISTER, transfer(plan, backend, settings.register_timeout_s))


async def register_all(
    offers: Mapping[str, Offer], backends: Mapping[str, TransferBackend], settings: Settings | None = None
) -> dict[str, Receipt | KVRegError]:
    """Register many workers at once, by name; one worker's refusal or failure is its own outcome and stops no other."""
    outcomes: dict[str, Receipt | KVRegError] = {}

    async def one(name: str) -> None:
        try:
            outcomes[name] = await register(offers[name], backends[name], settings)
        except KVRegError as error:
            outcomes[name] = error

    async with anyio.create_task_group() as workers:
        for name in offers:
            workers.start_soon(one, name)
    return {name: outcomes[name] for name in offers}
