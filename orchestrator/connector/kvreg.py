"""LMCache's connector with registration replaced by the pipeline, and refusals made survivable."""

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any
from uuid import uuid4

import torch
from lmcache.integration.vllm.experimental import dispatch
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.integration.vllm.mp_server_launcher import is_mp_server_autostart_enabled
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from metrics.counts import CountsObserver
from metrics.events import EventObserver, event_logger
from metrics.ledger import Ledger
from metrics.observer import Observer, Outcome, Run, tell
from metrics.termination import TerminationLog
from orchestrator.backend.lmcache import LMCacheBackend, chunk_size_tokens
from orchestrator.backend.lmcache_border import foreign
from orchestrator.config import KVRegConfig, LogFormat, OnRefusal
from orchestrator.connector import bypass
from orchestrator.connector.bypass import Bypass, unless_bypassed
from orchestrator.connector.stats import ConnectorPromMetrics, ConnectorStats
from orchestrator.engine import compat
from orchestrator.engine.observe import observe
from orchestrator.engine_stats import drained
from orchestrator.logs import set_up_logs
from orchestrator.pipeline import Settings, register
from orchestrator.plugin import ledger_place
from orchestrator.portal import run_sync
from orchestrator.recovery import Recovery
from orchestrator.snapshots import keep_snapshot
from stages.errors import KVRegError, Reason, RegistrationRejected, TransferRefused, TransferUnavailable
from stages.model import MLA_KINDS, Offer, Receipt
from stages.transfer import transfer
from stages.validate import Refusals, check_groups

_log = logging.getLogger("kvreg.connector")

_SEPARATE_OBJECT_GROUPS = (
    "this model keeps recurrent state: the LMCache server must run with --separate-object-groups, or a hit on part of a stored "
    "prompt loads a state that was never computed; the server does not say whether it does"
)
"""What can be wrong with a registration that is right, and cannot be seen from here."""

_DEFAULT_HOST, _DEFAULT_PORT = "tcp://localhost", 5555


class KVRegConnector(LMCacheMPConnector):
    """LMCache's multi-process connector with a proven registration. Both roles check the engine's groups before they connect."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        """Check the groups, wait for the server, connect. Raises ConfigError, and what was refused unless it is bypassed."""
        self._config = KVRegConfig.parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        set_up_logs(as_json=self._config.log_format is LogFormat.JSON)
        self._counts = CountsObserver()
        self._observers = (self._counts, *observers(self._config))
        self.bypass: Bypass | None = None
        self._backend: LMCacheBackend | None = None
        self._receipt: Receipt | None = None
        try:
            offer = observe(kv_cache_config, {}, vllm_config=vllm_config)
            self._check_groups(offer)
            _check_computes_on_hits(offer, vllm_config)
            if not is_mp_server_autostart_enabled(vllm_config.kv_transfer_config.kv_connector_extra_config):
                for chunk in run_sync(lambda: _chunk_sizes(server_urls(vllm_config, role), self._config.register_timeout_s)):
                    self._check_groups(replace(offer, chunk_size_tokens=chunk))
            foreign(super().__init__, vllm_config, role, kv_cache_config)
            self._check_groups(replace(offer, chunk_size_tokens=self._chunk_size_tokens))
        except KVRegError as refusal:
            KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
            self._refuse_unrun(refusal)

    def _check_groups(self, offer: Offer) -> None:
        """What the groups alone can say. Raises RegistrationRejected, with its snapshot kept."""
        refusals = Refusals()
        check_groups(offer, refusals)
        try:
            refusals.raise_if_any()
        except RegistrationRejected:
            keep_snapshot(offer, self._config, refused=True)
            raise

    @property
    def _chunk_size_tokens(self) -> int:
        adapter = self.worker_adapter if self.role is KVConnectorRole.WORKER else self.scheduler_adapter
        return int(adapter.lmcache_tokens_per_chunk)

    # ------------------------------------------------------------------------------------------------ registration

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the worker's caches through the pipeline to the LMCache server. Raises what was refused unless it is bypassed."""
        if self.bypass:
            return
        try:
            offer = observe(self._kv_cache_config, kv_caches, vllm_config=self._vllm_config, chunk_size_tokens=self._chunk_size_tokens)
        except KVRegError as refusal:
            self._refuse_unrun(refusal)
            return
        backend = self._backend or LMCacheBackend(self.worker_adapter, lambda: _held(kv_caches, self._vllm_config))
        self._backend = backend
        settings = Settings(observers=self._observers, register_timeout_s=self._config.register_timeout_s)
        try:
            receipt = run_sync(lambda: register(offer, backend, settings))
        except KVRegError as refusal:
            keep_snapshot(offer, self._config, refused=True)
            self._refuse(refusal, self._run())
            return
        keep_snapshot(offer, self._config, refused=False)
        self._receipt = receipt
        if any(group.recurrent_state for group in receipt.plan.groups):
            _log.warning("kvreg: %s", _SEPARATE_OBJECT_GROUPS)
        # The heartbeat that calls it starts with the first transfer.
        self.worker_adapter._reregister_kv_caches_callback = Recovery(
            self._resend, self._run(), self._observers, self._config.register_timeout_s
        )
        if self.dispatcher is not None:
            views = {layer.layer.name: layer.view for layer in receipt.plan.layers}
            dispatch(self.dispatcher, "register", kv_caches=views, kv_cache_config=self._kv_cache_config, vllm_config=self._vllm_config)

    async def _resend(self) -> None:
        assert self._backend is not None
        await self._backend.resend()
        if self.dispatcher is not None and not foreign(self.dispatcher.reregister):
            raise TransferUnavailable(Reason.TRANSFER_UNREACHABLE, {"backend": self._backend.name, "part": "intermediate tensors"})

    def unregister_kv_caches(self) -> None:
        """Before the engine sleeps: the server forgets this worker's caches, the worker keeps its plan."""
        if self._backend is not None and self._receipt is not None:
            backend, plan = self._backend, self._receipt.plan
            run_sync(lambda: backend.unregister(plan))

    def restore_kv_caches(self) -> None:
        """After the engine woke up: the same plan again. Raises TransferError, bypass or not: the scheduler counts on this worker."""
        if self._backend is None or self._receipt is None:
            return
        backend, plan, timeout_s = self._backend, self._receipt.plan, self._config.register_timeout_s
        outcome = Outcome.FAILED
        try:
            self._receipt = run_sync(lambda: transfer(plan, backend, timeout_s))
            outcome = Outcome.REGISTERED
        finally:
            tell(self._observers, lambda observer: observer.recovered(self._run(), outcome))

    release_kv_caches = unregister_kv_caches
    """What later vLLM releases call it."""

    @classmethod
    def supports_sleep_mode(cls, _extra_config: Mapping[str, Any]) -> bool:
        """Whether a sleeping engine may unmap the caches: yes, `release_kv_caches` lets go of them."""
        return True

    def shutdown(self) -> None:
        """Stop, even in the middle of a registration."""
        if self._backend is not None:
            self._backend.close()
        super().shutdown()

    # ------------------------------------------------------------------------------------------------------ bypass

    def _run(self) -> Run:
        """A run of this worker, or of the scheduler, outside the pipeline."""
        worker_id = str(compat.worker(self._vllm_config).rank)
        return Run(uuid4().hex, compat.model_name(self._vllm_config), self.role.name.lower(), worker_id)

    def _refuse_unrun(self, refusal: KVRegError) -> None:
        """Refuse before the pipeline could run: observers are told of a run that ended at once."""
        run = self._run()
        outcome = Outcome.REJECTED if isinstance(refusal, RegistrationRejected) else Outcome.FAILED
        tell(self._observers, lambda observer: observer.started(run))
        tell(self._observers, lambda observer: observer.finished(run, outcome, refusal))
        self._refuse(refusal, run)

    def _refuse(self, refusal: KVRegError, run: Run) -> None:
        """Raise the refusal, or serve without the external cache: not once registered, for the scheduler then counts on it."""
        if self._config.on_refusal is OnRefusal.STOP or self._receipt is not None:
            raise refusal
        self.bypass = Bypass(str(refusal))
        tell(self._observers, lambda observer: observer.bypassed(run, refusal))

    def get_handshake_metadata(self) -> bypass.Handshake:
        """Tells the scheduler whether this worker was refused."""
        return bypass.Handshake(self.bypass.why if self.bypass else None)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """One refused worker bypasses the whole engine."""
        refusals = [worker.refusal for worker in metadata.values() if worker.refusal]
        if refusals and not self.bypass:
            self.bypass = Bypass(refusals[0])

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """A worker that registered learns here that another was refused."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, bypass.Metadata) and not self.bypass:
            self.bypass = Bypass(connector_metadata.why)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """LMCache's work for this step, or none while bypassed."""
        if not self.bypass:
            return super().build_connector_meta(scheduler_output)
        self.bypass.remind()
        return bypass.Metadata(self.bypass.why)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Transfers that ended; none while bypassed."""
        if self.bypass:
            return KVConnectorBase_V1.get_transfer_results(self, finished_req_ids)
        return super().get_transfer_results(finished_req_ids)

    get_num_new_matched_tokens = unless_bypassed(LMCacheMPConnector.get_num_new_matched_tokens, lambda: (0, False))
    on_new_request = unless_bypassed(LMCacheMPConnector.on_new_request, lambda: None)
    update_state_after_alloc = unless_bypassed(LMCacheMPConnector.update_state_after_alloc, lambda: None)
    update_connector_output = unless_bypassed(LMCacheMPConnector.update_connector_output, lambda: None)
    request_finished = unless_bypassed(LMCacheMPConnector.request_finished, lambda: (False, None))
    request_finished_all_groups = unless_bypassed(LMCacheMPConnector.request_finished_all_groups, lambda: (False, None))
    take_events = unless_bypassed(LMCacheMPConnector.take_events, lambda: ())
    has_pending_push_work = unless_bypassed(LMCacheMPConnector.has_pending_push_work, lambda: False)
    bind_gpu_block_pool = unless_bypassed(LMCacheMPConnector.bind_gpu_block_pool, lambda: None)
    reset_cache = unless_bypassed(LMCacheMPConnector.reset_cache, lambda: None)
    start_load_kv = unless_bypassed(LMCacheMPConnector.start_load_kv, lambda: None)
    save_kv_layer = unless_bypassed(LMCacheMPConnector.save_kv_layer, lambda: None)
    wait_for_save = unless_bypassed(LMCacheMPConnector.wait_for_save, lambda: None)
    handle_preemptions = unless_bypassed(LMCacheMPConnector.handle_preemptions, lambda: None)
    get_finished = unless_bypassed(LMCacheMPConnector.get_finished, lambda: (None, None))
    build_connector_worker_meta = unless_bypassed(LMCacheMPConnector.build_connector_worker_meta, lambda: None)
    get_block_ids_with_load_errors = unless_bypassed(LMCacheMPConnector.get_block_ids_with_load_errors, lambda: set())
    get_kv_connector_kv_cache_events = unless_bypassed(LMCacheMPConnector.get_kv_connector_kv_cache_events, lambda: None)

    # ------------------------------------------------------------------------------------------------------- metrics

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """What LMCache's connector and the registrations counted since the last call."""
        return ConnectorStats.of(None if self.bypass else super().get_kv_connector_stats(), drained(self._counts))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        """The statistics that vLLM passed on as plain values."""
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any, **named: Any) -> ConnectorPromMetrics:
        """The metrics of the engine's API server that these statistics become."""
        return ConnectorPromMetrics(*arguments, **named)


def observers(config: KVRegConfig) -> tuple[Observer, ...]:
    """Who watches a connector's registrations, beside its own counts."""
    place = ledger_place(config, os.environ)
    events = EventObserver(event_logger(as_json=config.log_format is LogFormat.JSON))
    return (events, TerminationLog(), *([Ledger(*place)] if place else []))


def server_urls(vllm_config: Any, role: KVConnectorRole) -> tuple[str, ...]:
    """The servers this role talks to, by LMCache's own settings: a worker to its node's, the scheduler to all."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    named = extra.get("lmcache.mp.server_urls")
    if not named:
        named = f"{extra.get('lmcache.mp.host', _DEFAULT_HOST)}:{extra.get('lmcache.mp.port', _DEFAULT_PORT)}"
    urls = [url.strip() for url in (named.split(",") if isinstance(named, str) else named)]
    urls = [url if "://" in url else f"tcp://{url}" for url in urls if url]
    if role is KVConnectorRole.SCHEDULER:
        return tuple(urls)
    workers_per_server = max(vllm_config.parallel_config.world_size // len(urls), 1)
    return (urls[min(vllm_config.parallel_config.rank // workers_per_server, len(urls) - 1)],)


async def _chunk_sizes(urls: Iterable[str], timeout_s: float) -> list[int]:
    """Each server's chunk size, once it is up."""
    return [await chunk_size_tokens(url, timeout_s) for url in urls]


def _check_computes_on_hits(offer: Offer, vllm_config: Any) -> None:
    """Refuse an engine that computes as if what was loaded were not there: vLLM's MLA kernels on most CPUs.

    vLLM then turns prefix caching off for itself, but goes on taking hits from a connector.
    """
    layers = tuple(name for group in offer.groups for name, spec in group.specs.items() if spec.kind in MLA_KINDS)
    device = str(vllm_config.device_config.device_type)
    if layers and device == "cpu" and not vllm_config.cache_config.enable_prefix_caching:
        raise TransferRefused(Reason.PREFIX_UNREAD, {"device": device, "layers": layers})


def _held(kv_caches: Mapping[str, Any], vllm_config: Any) -> dict[str, list[torch.Tensor]]:
    """Every tensor by which this worker reaches its caches: those it registers and those its layers are bound to."""
    held = {name: list(_tensors(cache)) for name, cache in kv_caches.items()}
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        held.setdefault(name, []).extend(_tensors(getattr(layer, "kv_cache", ())))
    return held


def _tensors(cache: Any) -> Iterable[torch.Tensor]:
    return (cache,) if isinstance(cache, torch.Tensor) else (part for part in cache or () if isinstance(part, torch.Tensor))
