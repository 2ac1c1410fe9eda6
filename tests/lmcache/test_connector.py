"""The connector's own decisions, without an engine."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="LMCache is not installed")
pytest.importorskip("vllm", reason="vLLM is not installed")

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.integration.vllm.lmcache_mp_metrics import LMCacheMPConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, supports_hma

from metrics.counts import CountsObserver
from metrics.observer import Observer, Outcome, Run
from orchestrator.config import KVRegConfig
from orchestrator.connector import KVRegConnector, bypass
from orchestrator.connector.bypass import Bypass
from orchestrator.connector.kvreg import server_urls
from orchestrator.connector.stats import ConnectorStats
from orchestrator.engine_stats import RegistrationStats, drained
from stages.edit import edit
from stages.engine_groups import engine_groups
from stages.errors import Reason, TransferError, TransferRefused
from stages.model import Plan, Receipt
from stages.validate import validate
from tests.offers import hybrid

pytestmark = pytest.mark.lmcache

NEEDS_NO_SERVER = {
    "role",
    "transfer_intermediate_tensors",
    "wait_for_layer_load",
    "get_required_kvcache_layout",
    "get_finished_count",
    "shutdown",
}
"""Methods of LMCache's connector that are safe as they are on one that never connected."""


def bypassed(role: KVConnectorRole) -> KVRegConnector:
    """A connector that was refused before LMCache's part of it existed."""
    connector: KVRegConnector = object.__new__(KVRegConnector)
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))
    KVConnectorBase_V1.__init__(connector, config, role, SimpleNamespace(kv_cache_groups=[]))
    connector._config = KVRegConfig.parse({"kvreg.on_refusal": "bypass"})
    connector._backend = connector._receipt = None
    connector._counts = SimpleNamespace(drain=dict)
    connector.bypass = Bypass("a reason")
    return connector


def test_every_method_of_lmcaches_connector_is_either_ours_or_safe_without_a_server() -> None:
    """LMCache adds a method in a release: I learn of it here, not from a bypassed engine that crashes."""
    theirs = {name for name, _ in inspect.getmembers(LMCacheMPConnector) if name in vars(LMCacheMPConnector) and not name.startswith("_")}
    ours = {name for name in theirs if name in vars(KVRegConnector)}
    classwide = {name for name in theirs if isinstance(inspect.getattr_static(LMCacheMPConnector, name), classmethod)}
    assert theirs - ours - NEEDS_NO_SERVER - classwide == set()


def test_a_bypassed_scheduler_looks_nothing_up_and_tells_the_workers() -> None:
    """Requests come and go as if there were no cache, and each step's metadata says why."""
    scheduler: Any = bypassed(KVConnectorRole.SCHEDULER)
    assert scheduler.get_num_new_matched_tokens(object(), 0) == (0, False)
    assert scheduler.update_state_after_alloc(object(), object(), 0) is None
    assert scheduler.request_finished(object(), []) == (False, None)
    assert scheduler.request_finished_all_groups(object(), ()) == (False, None)
    assert list(scheduler.take_events()) == []
    assert scheduler.reset_cache() is None
    metadata = scheduler.build_connector_meta(object())
    assert (metadata.why, len(metadata)) == ("a reason", 0)


def test_a_bypassed_worker_transfers_nothing() -> None:
    """The worker's part of every step is empty, whatever the scheduler sends."""
    worker: Any = bypassed(KVConnectorRole.WORKER)
    worker.register_kv_caches({"layer": object()})
    worker.bind_connector_metadata(bypass.Metadata("a reason"))
    worker.start_load_kv(object())
    worker.wait_for_save()
    assert worker.get_finished({"request"}) == (None, None)
    results = worker.get_transfer_results({"request"})
    assert not results.finished_sending
    assert not results.finished_recving
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.get_kv_connector_stats() is None
    assert worker.get_handshake_metadata() == bypass.Handshake("a reason")
    worker.shutdown()


class Backend:
    """Takes a plan, or refuses it, and says which calls came."""

    name = "told"

    def __init__(self, refusal: TransferError | None = None) -> None:
        self.refusal = refusal

    async def register(self, plan: Plan) -> str:
        if self.refusal:
            raise self.refusal
        return "told-1"

    async def unregister(self, plan: Plan) -> None:
        self.unregistered = plan


class Recoveries(Observer):
    """What became of plans that were sent again."""

    def __init__(self) -> None:
        self.seen: list[Outcome] = []

    def recovered(self, run: Run, outcome: Outcome) -> None:
        self.seen.append(outcome)


def registered(backend: Backend) -> tuple[Any, Receipt, Recoveries]:
    """A worker's connector that may bypass refusals, registered with a backend."""
    worker: Any = bypassed(KVConnectorRole.WORKER)
    worker.bypass = None
    worker._backend, seen = backend, Recoveries()
    worker._observers = (seen,)
    worker._run = lambda: Run("run", "model", "worker", "0")
    worker._receipt = receipt = Receipt(engine_groups(edit(validate(hybrid()))), backend.name, "told-1")
    return worker, receipt, seen


def test_a_worker_sleeps_and_wakes_with_the_same_plan() -> None:
    """Before the sleep the server is told to forget the caches; after it the very same plan is registered, and counted."""
    backend = Backend()
    worker, receipt, seen = registered(backend)
    worker.unregister_kv_caches()
    assert backend.unregistered is receipt.plan
    worker.restore_kv_caches()
    assert worker._receipt.plan is receipt.plan
    assert seen.seen == [Outcome.REGISTERED]


def test_a_registered_worker_never_steps_aside_alone() -> None:
    """The scheduler counts on it by then: a wake-up that fails, or a second registration, is an error under bypass too."""
    refusal = TransferRefused(Reason.ALREADY_REGISTERED, {"registration": "told-1"})
    worker, receipt, seen = registered(Backend(refusal))
    with pytest.raises(TransferRefused):
        worker.restore_kv_caches()
    with pytest.raises(TransferRefused):
        worker._refuse(refusal, worker._run())
    assert (worker.bypass, worker._receipt) == (None, receipt)
    assert seen.seen == [Outcome.FAILED]


def test_one_refused_worker_bypasses_the_scheduler_and_through_it_every_worker(caplog: pytest.LogCaptureFixture) -> None:
    """One of many workers is refused, on any pipeline stage, and no other goes on alone."""
    scheduler: Any = bypassed(KVConnectorRole.SCHEDULER)
    scheduler.bypass = None
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): bypass.Handshake(None), (1, 0): bypass.Handshake("layer x")})
    other: Any = bypassed(KVConnectorRole.WORKER)
    other.bypass = None
    other.bind_connector_metadata(scheduler.build_connector_meta(object()))
    assert other.bypass.why == "layer x"
    assert caplog.text.count("layer x") == 2


def test_the_reason_is_said_again_once_a_minute(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bypassed engine that serves for hours goes on saying so, without filling the log."""
    now = [1000.0]
    monkeypatch.setattr(bypass.time, "monotonic", lambda: now[0])
    said = Bypass("a reason")
    for now[0] in (1001.0, 1059.9, 1060.0, 1061.0, 1120.5):
        said.remind()
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3


def test_hybrids_keep_their_groups_with_this_connector() -> None:
    """vLLM sees that the connector takes several cache groups."""
    assert supports_hma(KVRegConnector)


@pytest.mark.parametrize(
    ("extra", "rank", "expected"),
    [
        ({}, 0, ("tcp://localhost:5555",)),
        ({"lmcache.mp.host": "tcp://10.0.0.1", "lmcache.mp.port": 6000}, 0, ("tcp://10.0.0.1:6000",)),
        ({"lmcache.mp.host": "10.0.0.1", "lmcache.mp.port": "6000"}, 0, ("tcp://10.0.0.1:6000",)),
        ({"lmcache.mp.server_urls": "tcp://a:1, b:2"}, 3, ("tcp://b:2",)),
        ({"lmcache.mp.server_urls": ["grpc://a:1", "b:2"]}, 1, ("grpc://a:1",)),
    ],
)
def test_servers_are_found_by_lmcaches_own_settings(extra: dict[str, Any], rank: int, expected: tuple[str, ...]) -> None:
    """A worker waits for its node's server, as LMCache's connector will call it."""
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra), parallel_config=SimpleNamespace(world_size=4, rank=rank)
    )
    assert server_urls(config, KVConnectorRole.WORKER) == expected
    assert expected[0] in server_urls(config, KVConnectorRole.SCHEDULER)


def test_lmcaches_and_kvregs_statistics_travel_together() -> None:
    """Lookups and registrations of several workers and steps reach the engine's metrics side by side."""
    lookups = LMCacheMPConnectorStats()
    lookups.record_lookup(0.25)
    assert ConnectorStats.of(None, None) is None
    assert ConnectorStats.of(LMCacheMPConnectorStats(), RegistrationStats()) is None
    counts = CountsObserver()
    counts.finished(Run("run", "model", "worker", "0"), Outcome.REGISTERED, None)
    first = ConnectorStats.of(lookups, None)
    second = ConnectorStats.of(None, drained(counts))
    assert first is not None
    assert second is not None
    both = KVRegConnector.build_kv_connector_stats(dict(first.aggregate(second).to_dict()))
    summary = both.reduce()
    assert summary["LMCache MP lookup count"] == 1
    assert summary["Registrations registered"] == 1
    both.reset()
    assert both.is_empty()
