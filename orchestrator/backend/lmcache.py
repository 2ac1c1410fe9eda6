"""The LMCache backend: a plan registered with an LMCache server, by way of LMCache's own worker adapter.

The server never tells a worker that it refused a registration; it just does not answer. So the server's own reading of
the views is run here first, and whatever differs from what was proven is refused before anything is sent. The adapter
learns of a registration only after the server has acknowledged it.
"""

import logging
import os
import threading
import time
from functools import cache
from typing import Any

import zmq
from lmcache.utils import EngineType
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.transfer_context.worker_transfer import ENV_MP_TRANSFER_MODE
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
from lmcache.v1.platform import get_device_spec

from orchestrator.backend.lmcache_border import answered, first_answered, foreign
from orchestrator.backend.lmcache_context import Context, Held, handles
from orchestrator.backend.lmcache_reading import check_reading, group_infos, layout_hints
from orchestrator.backend.retries import limits_s
from stages.errors import Reason, TransferRefused, TransferUnavailable
from stages.model import Plan

_log = logging.getLogger("kvreg.lmcache")

LMCACHE_DRIVEN = "lmcache_driven"
"""The one transfer mode whose reading of a page is proven: the server copies, by the registered views."""

REGISTER_FIRST_S, REGISTER_LONGEST_S = 5.0, 40.0
"""How long a registration waits for its acknowledgement before it is sent again; see docs/scale.md."""

ASK_FIRST_S, ASK_LONGEST_S = 2.5, 10.0
"""The same for the chunk size, a question that costs a server next to nothing."""

_ANSWER_TO_FORGET_S = 3.0


class LMCacheBackend:
    """A `TransferBackend` for one worker. `adapter` is LMCache's worker adapter; `held` the engine's own views, by layer."""

    name = "lmcache"

    def __init__(self, adapter: Any, held: Held = dict) -> None:
        self._adapter = adapter
        self._held = held
        self._registration: Registration | None = None
        self._closing = threading.Event()

    async def register(self, plan: Plan) -> str:
        """Send a plan until the server acknowledges it, then publish it to the adapter.

        Tries again for as long as the caller lets it. Raises TransferRefused: ALREADY_REGISTERED, NOTHING_TO_REGISTER,
        TRANSFER_MODE, SERVER_DISAGREES, PADDED_PAGES_ON_CPU, SHARED_MEMORY, TRANSFER_REFUSED, SHUTTING_DOWN.
        """
        if self._registration is not None:
            raise TransferRefused(Reason.ALREADY_REGISTERED, {"registration": self._name})
        if not plan.layers:
            raise TransferRefused(Reason.NOTHING_TO_REGISTER, {"worker": plan.offer.worker.rank})
        check_mode(self._adapter, plan)
        check_reading(plan, self._adapter.lmcache_tokens_per_chunk)
        self._registration = registration = Registration(self._adapter, plan, self._held)
        registered = False
        try:
            await self._send(registration)
            registration.publish()
            registered = True
        finally:
            if not registered:
                # Sent behind the registration on the same connection; nobody waits for a server that may be gone.
                self._registration = None
                registration.forget()
        return self._name

    async def unregister(self, plan: Plan) -> None:
        """Tell the server to forget a plan. A server that does not answer forgets it when the worker's pings end."""
        registration = self._registration
        if registration is None or registration.plan is not plan:
            return
        self._registration = None
        answer = registration.forget()
        if answer is not None and not await answered(answer, _ANSWER_TO_FORGET_S):
            _log.warning("kvreg: the LMCache server did not acknowledge that this worker unregistered")

    async def resend(self) -> None:
        """Send the registered plan again, unchanged: to a server that has forgotten it. Raises as `register` does."""
        if self._registration is not None:
            await self._send(self._registration)

    def close(self) -> None:
        """Make a registration under way end now, from any thread."""
        self._closing.set()

    @property
    def _name(self) -> str:
        return f"{self.name}-{self._adapter.instance_id}"

    async def _send(self, registration: "Registration") -> None:
        began, sent = time.monotonic(), list[MessagingFuture[Any]]()
        limits = limits_s(REGISTER_FIRST_S, REGISTER_LONGEST_S)
        while True:
            # A server that dies with the request in hand never answers it; one that has it already says so again.
            sent.append(foreign(registration.send))
            # Whichever is answered counts: a server whose queue is longer than the limit would else never be heard.
            answer = await first_answered(sent, next(limits), self._check_closing)
            if answer is not None:
                foreign(answer.result, 0)
                return
            waited_s = round(time.monotonic() - began)
            _log.warning("kvreg: no answer from the LMCache server yet; attempt=%d waited_s=%d", len(sent), waited_s)

    def _check_closing(self) -> None:
        if self._closing.is_set():
            raise TransferRefused(Reason.SHUTTING_DOWN, {"backend": self.name})


class Registration:
    """One plan in LMCache's words: views in the plan's order, group infos, layout hint, and handles the server can open."""

    def __init__(self, adapter: Any, plan: Plan, held: Held) -> None:
        self.plan = plan
        self._adapter = adapter
        self._views = {layer.layer.name: layer.view for layer in plan.layers}
        self._infos = group_infos(plan)
        self._hints = layout_hints(plan)
        self._device = plan.layers[0].view.device
        self._handles = handles(plan, held)
        self.context = Context(adapter.instance_id, adapter.req_client, self._forgotten)

    def send(self) -> MessagingFuture[Any]:
        """Submit the registration; the answer is the server's acknowledgement."""
        adapter = self._adapter
        return self.context.submit(self._handles(), adapter.model_name, adapter.world_size, EngineType.VLLM, self._hints, list(self._infos))

    def publish(self) -> None:
        """Let the adapter use what the server has acknowledged."""
        self.context.acknowledged(self._device, self._adapter._mq_timeout)
        self._adapter.kv_caches = self._views
        self._adapter.engine_group_infos = list(self._infos)
        self._adapter._layout_hints = self._hints
        self._adapter.transfer_ctx = self.context

    def _forgotten(self) -> None:
        """Have the adapter's heartbeat recover, as it does after a restart that it noticed."""
        _log.warning("kvreg: the LMCache server does not know this worker any more: it has restarted")
        self._adapter._health_event.clear()

    def forget(self) -> MessagingFuture[Any] | None:
        """Undo `publish` and `send`; the server's acknowledgement to come, None if it was sent nothing. Never raises."""
        self._adapter.transfer_ctx = None
        self._adapter.kv_caches = {}
        self._adapter.engine_group_infos = []
        try:
            return self.context.unregister()
        except Exception:  # noqa: BLE001 - a client that is closed already has nothing to tell the server
            return None
        finally:
            self.context.close()


def check_mode(adapter: Any, plan: Plan) -> None:
    """Refuse a transfer mode other than lmcache_driven: another one copies by a reading that was not proven."""
    mode = str(adapter._mp_transfer_mode or os.environ.get(ENV_MP_TRANSFER_MODE, "auto")).lower()
    device = plan.layers[0].view.device.type
    if mode == "auto":
        spec = get_device_spec(device)
        mode = spec.default_mp_transfer_mode().value if spec else "engine_driven"
    if mode != LMCACHE_DRIVEN:
        raise TransferRefused(Reason.TRANSFER_MODE, {"mode": mode, "device": device})


@cache
def _asking() -> zmq.Context[zmq.Socket[bytes]]:
    """The sockets' home of all who ask for a chunk size, and of nobody else; what one that closes has not sent is dropped.

    LMCache closes a client's monitor before its socket. A socket that lingers then, because its server was not up, stops its
    context's only thread once that server comes and goes, and with it every connection that shares the context.
    """
    context = zmq.Context()
    context.setsockopt(zmq.LINGER, 0)
    return context


async def chunk_size_tokens(url: str, timeout_s: float) -> int:
    """The chunk size of the server at `url`, once it is up. Raises TransferUnavailable after `timeout_s` seconds.

    Asks again and again, a little irregularly so that many workers do not ask in step, and says so in the log.
    """
    began = time.monotonic()
    client = foreign(lambda: RequestClientFactory.create(url, context=_asking()))
    try:
        sent: list[MessagingFuture[Any]] = []
        limits = limits_s(ASK_FIRST_S, ASK_LONGEST_S)
        while True:
            sent.append(foreign(client.get_chunk_size))
            left_s = timeout_s - (time.monotonic() - began)
            answer = await first_answered(sent, min(next(limits), max(left_s, 0)))
            if answer is not None:
                return int(foreign(answer.result, 0))
            waited_s = round(time.monotonic() - began, 1)
            if waited_s >= timeout_s:
                raise TransferUnavailable(Reason.TRANSFER_UNREACHABLE, {"url": url, "waited_s": waited_s})
            _log.warning("kvreg: waiting for the LMCache server at %s: waited_s=%s of %s", url, waited_s, timeout_s)
    finally:
        client.close()
