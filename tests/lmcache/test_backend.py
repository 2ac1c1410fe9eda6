"""The LMCache backend against LMCache's own code, without a server: what is refused, what is sent, and when it is published."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache", reason="LMCache is not installed")

from lmcache.v1.multiprocess.futures import MessagingFuture

from orchestrator.backend import lmcache
from orchestrator.backend.lmcache import LMCacheBackend, check_mode
from orchestrator.backend.lmcache_reading import check_reading, group_infos, layout_hints
from orchestrator.portal import run_sync
from stages.edit import edit
from stages.engine_groups import engine_groups
from stages.errors import Reason, TransferRefused
from stages.model import Engine, Kind, LayerCache, LeafSpec, Offer, OfferedGroup, Plan
from stages.validate import validate
from tests.offers import BLOCK, cache, hybrid

pytestmark = pytest.mark.lmcache


def plan(layout: str = "NHD") -> Plan:
    """A hybrid's proven plan."""
    return engine_groups(edit(validate(hybrid(layout=layout))))


@pytest.mark.parametrize("layout", ["NHD", "HND", "LBNHC", "LBHNC"])
def test_a_proven_plan_is_let_through(layout: str) -> None:
    """Under every layout, the groups, slots and strides that the server will derive are those of the proof."""
    check_reading(plan(layout), chunk_size_tokens=BLOCK)


@pytest.mark.parametrize(
    ("field", "planned"), [("slots_per_block", BLOCK - 1), ("block_stride_bytes", 8), ("num_blocks", 5), ("tokens_per_block", 2 * BLOCK)]
)
def test_a_view_that_lmcache_reads_otherwise_is_refused_with_both_readings(field: str, planned: int) -> None:
    """A plan that the server would take for another one never reaches the server."""
    good = plan()
    read = getattr(good.groups[1], field)
    wrong = replace(good, groups=(good.groups[0], replace(good.groups[1], **{field: planned})))
    if field == "tokens_per_block":  # the server is told this one, so it is its own check that fails
        with pytest.raises(TransferRefused, match="must be a multiple of tokens_per_block"):
            check_reading(wrong, chunk_size_tokens=BLOCK)
        return
    with pytest.raises(TransferRefused) as refused:
        check_reading(wrong, chunk_size_tokens=BLOCK)
    assert refused.value.reason is Reason.SERVER_DISAGREES
    assert f"{planned}≠{read}" in refused.value.facts.values()


def test_lmcaches_own_refusal_is_passed_on_in_its_words() -> None:
    """The server would refuse this chunk without telling the worker; here it is told at once, with the cause."""
    with pytest.raises(TransferRefused) as refused:
        check_reading(plan(), chunk_size_tokens=BLOCK + 1)
    assert refused.value.reason is Reason.TRANSFER_REFUSED
    assert "must be a multiple of tokens_per_block" in str(refused.value)
    assert isinstance(refused.value.__cause__, ValueError)


def test_padded_pages_on_cpu_are_refused_with_the_numbers() -> None:
    """The CPU server would accept such pages and then store nothing; I am told what it would copy of which stride."""
    good = plan()
    layer = good.layers[0]
    padded = torch.zeros(6 * 2048, dtype=torch.int8).as_strided((6, BLOCK, 1, 64), (2048, 64, 64, 1))
    planned = replace(layer.page.planned, stride_bytes=2048)
    page = replace(layer.page, dtype=torch.int8, width=64, planned=planned)
    group = replace(good.groups[0], layer_indices=(0,), block_stride_bytes=2048, slots_per_block=BLOCK)
    one = replace(good, layers=(layer._replace(view=padded, paging=replace(layer.paging, page=page)),), groups=(group,))
    with pytest.raises(TransferRefused) as refused:
        check_reading(one, chunk_size_tokens=BLOCK)
    assert refused.value.reason is Reason.PADDED_PAGES_ON_CPU
    assert (refused.value.facts["copied_bytes"], refused.value.facts["block_stride_bytes"]) == (BLOCK * 64, 2048)


def gdn_on_cpu(token_bytes: int, tokens_per_block: int) -> Plan:
    """What a gated-delta-net hybrid's engine hands over on CPU: 68,608 bytes of state in pages as long as its attention's."""
    state_bytes, page_bytes = 68_608, token_bytes * tokens_per_block
    spec = LeafSpec(Kind.MAMBA, tokens_per_block, page_bytes, 1, state_bytes, mamba_cache_mode="align")
    states = torch.empty(4 * page_bytes, dtype=torch.int8).as_strided((4, 1, 1, state_bytes), (page_bytes, state_bytes, state_bytes, 1))
    offer = Offer(Engine("test", "0"), (OfferedGroup(("state",), 4, {"state": spec}),), {"state": LayerCache((cache(states),))}, "LBHNC")
    return engine_groups(edit(validate(offer)))


def test_padded_pages_on_cpu_come_with_a_block_size_that_works_if_there_is_one() -> None:
    """With one KV head of 32 the engine's default block pads the state, and I am told the flag by which it does not."""
    with pytest.raises(TransferRefused, match="use --block-size 32, for blocks of 544 tokens; or a GPU") as refused:
        check_reading(gdn_on_cpu(128, 640), chunk_size_tokens=640)
    assert refused.value.reason is Reason.PADDED_PAGES_ON_CPU
    check_reading(gdn_on_cpu(128, 544), chunk_size_tokens=544)
    with pytest.raises(TransferRefused, match="no --block-size of 32, 64, 128 fills this model's pages"):
        check_reading(gdn_on_cpu(512, 256), chunk_size_tokens=256)


@pytest.mark.parametrize("mode", ["engine_driven", "auto", "ENGINE_DRIVEN"])
def test_a_transfer_mode_that_was_not_proven_is_refused(mode: str) -> None:
    """On CPU LMCache would let the worker copy by its own reading; kvreg says which setting to change."""
    with pytest.raises(TransferRefused, match="lmcache_driven"):
        check_mode(SimpleNamespace(_mp_transfer_mode=mode), plan())


def test_the_environment_may_choose_the_mode_as_in_lmcache(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache's environment variable works as before."""
    monkeypatch.setenv("LMCACHE_MP_TRANSFER_MODE", "lmcache_driven")
    check_mode(SimpleNamespace(_mp_transfer_mode=None), plan())


def test_groups_and_layout_are_told_in_lmcaches_fields() -> None:
    """What the server is sent is the plan, field by field."""
    good = plan("LBHNC")
    infos = group_infos(good)
    assert [info.engine_group_id for info in infos] == [0, 1]
    assert [info.layer_indices for info in infos] == [(0, 2), (1, 3)]
    assert [info.tokens_per_block for info in infos] == [BLOCK, BLOCK]
    assert [(info.sw_size_tokens, info.recurrent_state) for info in infos] == [(BLOCK, True), (-1, False)]
    assert layout_hints(good) == {"kv_layout": "HND"}
    assert layout_hints(plan("NHD")) == {"kv_layout": "NHD"}


class Adapter:
    """LMCache's worker adapter as far as registering needs it, with a server that acknowledges and remembers every request."""

    instance_id = 7
    model_name = "model"
    world_size = 1
    lmcache_tokens_per_chunk = BLOCK
    _mq_timeout = 60.0
    _mp_transfer_mode = "lmcache_driven"

    def __init__(self) -> None:
        self.req_client = self
        self.requests: list[tuple[Any, ...]] = []
        self.kv_caches: dict[str, torch.Tensor] = {}
        self.engine_group_infos: list[Any] = []
        self.transfer_ctx: Any = None
        self._layout_hints: Any = None
        self.published_before_the_answer: list[bool] = []

    def register_kv_cache(self, *arguments: Any) -> Any:
        self.published_before_the_answer.append(self.transfer_ctx is not None)
        return self._acknowledge(*arguments)

    def unregister_kv_cache(self, instance_id: int) -> Any:
        return self._acknowledge("unregister", instance_id)

    def _acknowledge(self, *request: Any) -> Any:
        self.requests.append(request)
        answer: Any = MessagingFuture()
        answer.set_result(None)
        return answer


def test_the_adapter_learns_of_a_registration_only_after_the_server_has_acknowledged_it() -> None:
    """No store can be submitted against a registration that the server does not hold."""
    adapter, good = Adapter(), plan()
    assert run_sync(lambda: LMCacheBackend(adapter).register(good)) == "lmcache-7"
    assert adapter.published_before_the_answer == [False]
    assert list(adapter.kv_caches) == [layer.layer.name for layer in good.layers]
    assert tuple(adapter.engine_group_infos) == group_infos(good)


def test_registering_twice_is_refused_and_leaves_the_first_as_it_is() -> None:
    """A second registration is told that there is one, and stores go on."""
    adapter, other = Adapter(), plan()
    backend = LMCacheBackend(adapter)
    run_sync(lambda: backend.register(plan()))
    with pytest.raises(TransferRefused) as refused:
        run_sync(lambda: backend.register(other))
    assert refused.value.reason is Reason.ALREADY_REGISTERED
    run_sync(lambda: backend.unregister(other))
    assert adapter.transfer_ctx is not None
    assert len(adapter.requests) == 1


def test_a_worker_without_a_layer_to_transfer_is_refused() -> None:
    """Nothing to register is said, not registered."""
    good = plan()
    with pytest.raises(TransferRefused) as refused:
        run_sync(lambda: LMCacheBackend(Adapter()).register(replace(good, layers=(), groups=())))
    assert refused.value.reason is Reason.NOTHING_TO_REGISTER


def test_unregistering_and_registering_again_works_any_number_of_times() -> None:
    """Sleep and wake: the same plan goes away and comes back."""
    adapter, good = Adapter(), plan()
    backend = LMCacheBackend(adapter)
    for _ in range(3):
        run_sync(lambda: backend.register(good))
        run_sync(lambda: backend.unregister(good))
        run_sync(lambda: backend.unregister(good))
        assert adapter.transfer_ctx is None
    assert [request[0] for request in adapter.requests] == [7, "unregister"] * 3


def test_re_sending_sends_the_same_plan() -> None:
    """After a server restart the new server gets what the old one had."""
    adapter, good = Adapter(), plan()
    backend = LMCacheBackend(adapter)
    run_sync(lambda: backend.register(good))
    run_sync(backend.resend)
    first, second = adapter.requests
    assert first == second


class Behind(Adapter):
    """An adapter whose server is one request behind: it answers the first when the second is there, and the second never."""

    def _acknowledge(self, *request: Any) -> Any:
        self.requests.append(request)
        self.answers = [*getattr(self, "answers", []), MessagingFuture()]
        if len(self.answers) == 2:
            self.answers[0].set_result(None)
        return self.answers[-1]


def test_an_answer_to_an_earlier_attempt_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose queue is longer than a worker's patience is heard, however late it answers."""
    monkeypatch.setattr(lmcache, "REGISTER_FIRST_S", 0.05)
    adapter = Behind()
    assert run_sync(lambda: LMCacheBackend(adapter).register(plan())) == "lmcache-7"
    assert len(adapter.requests) == 2


def test_the_handles_open_the_same_bytes_in_any_process_that_maps_them() -> None:
    """The server's tensors, opened by name, are the engine's memory: strides, offset and all."""
    adapter, good = Adapter(), plan()
    run_sync(lambda: LMCacheBackend(adapter).register(good))
    for layer, handle in zip(good.layers, adapter.requests[0][1], strict=True):
        layer.view.copy_(torch.randint(-99, 99, layer.view.shape).to(layer.view.dtype))
        opened = handle.to_tensor()
        assert opened.equal(layer.view)
        assert opened.stride() == layer.view.stride()
        opened.zero_()
        assert not layer.view.any()
