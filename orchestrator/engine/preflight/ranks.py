"""Every rank's place in one process: vLLM's own groups over torch's fake process group, through which nothing is ever sent."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist


@contextmanager
def as_rank(vllm_config: Any, rank: int) -> Iterator[None]:
    """Within, this process is worker `rank` of `vllm_config`: vLLM's groups say so, and are gone afterwards.

    vLLM makes two groups for every set of ranks, one for the device and one (gloo) for the host; both become fake, and what
    it would build over them (communicators, a broadcast queue in shared memory, the question who shares a node) waits for what
    ranks that never come would send, or reads it from memory that nobody wrote: left out, on one node.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    parallel = vllm_config.parallel_config
    new_group = dist.new_group

    def fake_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": "fake"})

    base = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
    with ExitStack() as patches:
        patches.enter_context(patch.object(dist, "new_group", fake_group))
        patches.enter_context(patch.object(shm_broadcast.MessageQueue, "create_from_process_group", lambda *_, **__: None))
        patches.enter_context(patch.object(type(current_platform), "get_device_communicator_cls", classmethod(lambda _: base)))
        patches.enter_context(patch.object(parallel_state, "in_the_same_node_as", _on_one_node))
        patches.callback(_leave, parallel_state)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.world_size)
        with set_current_vllm_config(vllm_config):
            parallel_state.init_distributed_environment(parallel.world_size, rank, "env://", rank, "fake")
            parallel_state.ensure_model_parallel_initialized(
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
                parallel.prefill_context_parallel_size,
                parallel.decode_context_parallel_size,
            )
            yield


def _on_one_node(group: Any, source_rank: int = 0) -> list[bool]:  # noqa: ARG001 - the question's
    return [True] * dist.get_world_size(group=group)


def _leave(parallel_state: Any) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
