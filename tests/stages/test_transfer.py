"""transfer-register: the receipt, and a time limit that ends as an error with its facts."""

import anyio
import pytest

from stages.edit import edit
from stages.engine_groups import engine_groups
from stages.errors import Reason, TransferRefused, TransferUnavailable
from stages.model import Plan, Receipt
from stages.transfer import transfer
from stages.validate import validate
from tests.offers import hybrid

pytestmark = pytest.mark.anyio


class Backend:
    """A backend that takes `takes_s` seconds of patience, and says whether it was left to finish."""

    name = "a-backend"

    def __init__(self, takes_s: float = 0, error: Exception | None = None) -> None:
        self.takes_s = takes_s
        self.error = error
        self.asked: list[Plan] = []

    async def register(self, plan: Plan) -> str:
        self.asked.append(plan)
        await anyio.sleep(self.takes_s)
        if self.error:
            raise self.error
        return "worker 0"

    async def unregister(self, plan: Plan) -> None: ...


def plan() -> Plan:
    return engine_groups(edit(validate(hybrid())))


async def test_a_receipt_names_the_plan_the_backend_and_its_name_for_it() -> None:
    """What was registered, where, and under which name: what a later unregister needs."""
    proven, backend = plan(), Backend()
    assert await transfer(proven, backend, 60) == Receipt(proven, "a-backend", "worker 0")
    assert backend.asked == [proven]


async def test_no_answer_in_time_is_an_error_that_says_who_and_how_long() -> None:
    """The operator reads which backend kept silent, and the limit to raise."""
    with pytest.raises(TransferUnavailable) as caught:
        await transfer(plan(), Backend(takes_s=3600), 0.01)
    assert caught.value.reason is Reason.TRANSFER_TIMEOUT
    assert caught.value.facts == {"backend": "a-backend", "timeout_s": 0.01}
    assert isinstance(caught.value.__cause__, TimeoutError)


async def test_a_backend_s_own_error_is_left_as_it_is() -> None:
    """A backend that says no is not a timeout, and its words are not replaced."""
    said = TransferRefused(Reason.TRANSFER_REFUSED, {"words": "no"})
    with pytest.raises(TransferRefused) as caught:
        await transfer(plan(), Backend(error=said), 60)
    assert caught.value is said
