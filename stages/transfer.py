"""transfer-register: a plan handed to a backend, within a time limit; the one stage that waits."""

from typing import Protocol

import anyio

from stages.errors import Reason, TransferUnavailable
from stages.model import Plan, Receipt


class TransferBackend(Protocol):
    """Where plans are registered. Both calls raise TransferUnavailable (try again) or TransferRefused (do not)."""

    @property
    def name(self) -> str:
        """For receipts, logs and metrics."""

    async def register(self, plan: Plan) -> str:
        """Register a plan and return the backend's own name for it, once the backend has said so.

        Whatever else ends the call, an error or a cancellation at any await, leaves nothing of the plan registered.
        """

    async def unregister(self, plan: Plan) -> None:
        """Forget a registered plan; one that is not registered is left alone, without an error."""


async def transfer(plan: Plan, backend: TransferBackend, timeout_s: float) -> Receipt:
    """The receipt, once the backend holds the plan. Raises TransferError; TRANSFER_TIMEOUT after `timeout_s` seconds."""
    try:
        with anyio.fail_after(timeout_s):
            return Receipt(plan, backend.name, await backend.register(plan))
    except TimeoutError as cause:
        raise TransferUnavailable(Reason.TRANSFER_TIMEOUT, {"backend": backend.name, "timeout_s": timeout_s}) from cause
