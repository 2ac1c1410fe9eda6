"""How a plan's views reach an LMCache server: handles that it can open, and the context that sends them and the transfers."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.transfer_context.worker_transfer import LMCacheDrivenTransferContext
from lmcache.v1.platform.base.event_ipc import get_event_ipc_backend
from lmcache.v1.platform.base.ipc_wire import CpuShmIPCData, TensorMetadata
from lmcache.v1.platform.devices.cpu.shm import CpuShmTensorWrapper
from lmcache.v1.platform.kv_wrap import wrap_kv_caches

from orchestrator.backend.lmcache_border import foreign
from orchestrator.shared_memory import Segment, share
from stages.model import EditedLayer, Plan

Held: TypeAlias = Callable[[], Mapping[str, Iterable[torch.Tensor]]]
"""The tensors by which the engine reaches its caches, by layer."""


class Context(LMCacheDrivenTransferContext):
    """LMCache's transfer context, with its one blocking registration cut in two: submitted here, awaited elsewhere.

    A server that restarts between two heartbeats is not noticed by them, and would then reject every transfer for ever.
    Such a rejection has a form of its own, no event and no success, and `forgotten` is called for it.
    """

    def __init__(self, instance_id: int, client: Any, forgotten: Callable[[], None]) -> None:
        super().__init__(instance_id, client)
        self._forgotten = forgotten
        self._answers: list[MessagingFuture[Any]] = []

    def submit(self, *arguments: Any) -> MessagingFuture[Any]:
        """Send REGISTER with these arguments after the instance id."""
        return self._submit_registration(lambda: self._req_client.register_kv_cache(self._instance_id, *arguments))

    def acknowledged(self, device: torch.device, mq_timeout_s: float) -> None:
        """Be ready for stores and retrieves on this device."""
        backend = get_event_ipc_backend(device)
        foreign(backend.check_event_support, device)
        self._device, self._event_backend, self._mq_timeout = device, backend, mq_timeout_s

    def submit_store(self, *arguments: Any, **named: Any) -> MessagingFuture[Any]:
        """A store, its answer watched."""
        return self._watched(super().submit_store(*arguments, **named))

    def submit_retrieve(self, *arguments: Any, **named: Any) -> MessagingFuture[Any]:
        """A retrieve, its answer watched."""
        return self._watched(super().submit_retrieve(*arguments, **named))

    def _watched(self, future: Any) -> MessagingFuture[Any]:
        """Look at the answers that are there by now: those of the transfers before this one."""
        done = {answer: answer.query() for answer in self._answers}
        self._answers = [answer for answer in self._answers if not done[answer]] + [future.raw_future_]
        if any(is_there and _unknown_worker(answer) for answer, is_there in done.items()):
            self._forgotten()
        watched: MessagingFuture[Any] = future
        return watched


def _unknown_worker(answer: MessagingFuture[Any]) -> bool:
    """Whether a transfer was rejected because the server holds no registration of this worker."""
    try:
        event, success, *_ = answer.result(0)
    except Exception:  # noqa: BLE001 - an answer that is an error is the adapter's to report
        return False
    return event == b"" and success is False


def handles(plan: Plan, held: Held) -> Callable[[], list[Any]]:
    """How to make the handles by which the server opens the plan's views, anew for each attempt."""
    if plan.layers[0].view.device.type != "cpu":
        views = {layer.layer.name: layer.view for layer in plan.layers}
        return lambda: wrap_kv_caches(views)
    segments = share((layer.view.untyped_storage() for layer in plan.layers), held())
    shared = [_shared_handle(layer, segments[layer.view.untyped_storage()._cdata]) for layer in plan.layers]
    return lambda: shared


def _shared_handle(layer: EditedLayer, segment: Segment) -> CpuShmTensorWrapper:
    """A view of a shared segment, strides and all: what LMCache's own wrapper can carry but does not make."""
    view = layer.view
    start, rest = divmod(segment.start_bytes, view.element_size())
    assert rest == 0, "the header of a segment is a multiple of every element size"
    metadata = TensorMetadata(
        dtype=str(view.dtype).removeprefix("torch."),
        shape=tuple(view.shape),
        stride=view.stride(),
        storage_offset=view.storage_offset() + start,
        device_uuid="cpu",
    )
    return foreign(
        CpuShmTensorWrapper.from_wire,
        CpuShmIPCData(version=1, metadata=metadata, shm_name=segment.name, nbytes=segment.size_bytes),
    )
