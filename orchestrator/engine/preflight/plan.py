"""vLLM's own steps from command line flags to registered caches, in the order that its engine takes them.

flags → engine configuration → (per rank) layers on `meta` → block size → specs → layout → groups → kernel blocks → caches
"""

import contextlib
import copy
import io
import json
import os
from argparse import ArgumentError, ArgumentTypeError
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from orchestrator.engine import compat
from orchestrator.engine.observe import observe
from orchestrator.engine.preflight import stand_ins
from orchestrator.engine.preflight.assumed import assume
from orchestrator.engine.preflight.ranks import as_rank
from orchestrator.engine.preflight.refusals import refused
from orchestrator.engine.preflight.targets import Target
from stages.errors import EngineUnsupported, PreflightImpossible
from stages.model import Offer

KV_TRANSFER_CONFIG = {"kv_connector": "KVRegConnector", "kv_connector_module_path": "orchestrator.connector", "kv_role": "kv_both"}
"""The one line, with nothing of a deployment in it."""

PLENTY_BYTES = 1 << 40
"""KV cache memory of a worker where no flag says how much. The real number depends on weights and activations, the layout does not."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What vLLM decided for one KV cache group, beside its specs: tokens of a scheduler's block and of a kernel's."""

    logical_block_tokens: int
    kernel_block_tokens: int
    backends: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """One rank's registration, on `meta`, and the facts of its groups, in their order."""

    tp_rank: int
    pp_rank: int
    offer: Offer
    groups: tuple[GroupFacts, ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """An engine's registrations before it exists."""

    target: Target | None
    workers: tuple[PlannedWorker, ...]
    architecture: str
    backend_chosen: bool
    """Whether a flag named the attention backend."""
    memory_chosen: bool
    """Whether a flag said how many blocks there are, or bytes for them."""
    kv_transfer_config: str


def plan(model: str, flags: Sequence[str], assumed: str | None = None, *, every_rank: bool = True) -> Planned:
    """What an engine of this model and these flags would register. Raises PreflightImpossible, or EngineUnsupported.

    `model` is a folder with a config.json, or the file itself; `flags` are vLLM's own. Without `every_rank` only the first
    tensor-parallel rank of each pipeline stage is planned: vLLM itself insists that the others have the same specs.
    """
    folder = _folder(model)
    target = assume(assumed)
    with refused():
        arguments, given = _arguments(folder, flags)
        vllm_config = arguments.create_engine_config()
        parallel = vllm_config.parallel_config
        if getattr(vllm_config.speculative_config, "draft_model_config", None) is not None:
            raise PreflightImpossible("layers of a draft model are not planned yet", "--speculative-config")
        ranks = [rank for rank in range(parallel.world_size) if every_rank or rank % parallel.tensor_parallel_size == 0]
        built = [_build(vllm_config, rank) for rank in ranks]
        memory_chosen = any(
            value is not None
            for value in (vllm_config.cache_config.num_gpu_blocks_override, vllm_config.cache_config.kv_cache_memory_bytes)
        )
        workers = _planned(vllm_config, built)
    return Planned(
        target,
        tuple(workers),
        str(vllm_config.model_config.architecture),
        arguments.attention_backend is not None,
        memory_chosen,
        json.dumps(given),
    )


@dataclass(frozen=True, slots=True)
class _Built:
    """A rank's layers and what they say; nothing of them but the configuration that lists them is kept."""

    rank: int
    vllm_config: Any
    specs: Mapping[str, Any]
    layouts: Sequence[str]


def _folder(model: str) -> str:
    path = Path(model)
    if path.is_file():
        if path.name != "config.json":
            raise PreflightImpossible(
                f"{model} is a file that is not called config.json, which is what vLLM looks for in a folder", "MODEL"
            )
        path = path.parent
    if not path.is_dir():
        raise PreflightImpossible(f"there is no folder {model}; nothing is fetched from a hub", "MODEL")
    if not (path / "config.json").is_file():
        raise PreflightImpossible(f"{path} holds no config.json", "MODEL")
    return os.fspath(path)


def _arguments(folder: str, flags: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """vLLM's own parse of the flags, and the --kv-transfer-config to use: the one given, or kvreg's.

    Tokens are not planned, so no tokenizer is asked for; a connector's class is asked, and kvreg's is answered for here.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="kvreg preflight MODEL", exit_on_error=False, add_help=False))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed = parser.parse_args(["--model", folder, "--skip-tokenizer-init", *flags])
    except (ArgumentError, ArgumentTypeError) as error:
        raise PreflightImpossible(str(error), getattr(error, "argument_name", None) or "") from error
    except SystemExit as error:
        raise PreflightImpossible(said.getvalue().rpartition("error: ")[2] or "vLLM's parser ended", "") from error
    arguments = AsyncEngineArgs.from_cli_args(parsed)
    given = _given(arguments.kv_transfer_config)
    asked = dict(given)
    if asked.get("kv_connector") == KV_TRANSFER_CONFIG["kv_connector"]:
        asked["kv_connector_module_path"] = "orchestrator.engine.preflight.connector"
    arguments.kv_transfer_config = asked
    return arguments, given


def _given(kv_transfer_config: Any) -> dict[str, Any]:
    if kv_transfer_config is None:
        return dict(KV_TRANSFER_CONFIG)
    if isinstance(kv_transfer_config, Mapping):
        return dict(kv_transfer_config)
    from dataclasses import fields

    declared = {field.name: getattr(kv_transfer_config, field.name) for field in fields(kv_transfer_config)}
    return {name: value for name, value in declared.items() if name.startswith("kv_") and value is not None}


def _build(engine_config: Any, rank: int) -> _Built:
    """One rank's layers on `meta`, and what vLLM's own worker says of them."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    vllm_config = copy.deepcopy(engine_config)
    vllm_config.parallel_config.rank = rank
    with as_rank(vllm_config, rank):
        with set_default_torch_dtype(vllm_config.model_config.dtype), torch.device("meta"), stand_ins.OnMeta():
            initialize_model(vllm_config)
        current_platform.update_block_size_for_backend(vllm_config)
        specs = get_kv_cache_spec(vllm_config)
        layouts = [layout.name for layout in _supported_layouts(vllm_config)]
    return _Built(rank, vllm_config, specs, layouts)


def _supported_layouts(vllm_config: Any) -> Sequence[Any]:
    try:
        from vllm.v1.worker.worker_base import get_current_attn_backends, get_supported_kv_cache_layouts
    except ImportError as error:
        raise EngineUnsupported("vLLM", compat.engine().version, "0.29 or newer to plan: one layout that its engine resolves") from error
    supported: Sequence[Any] = get_supported_kv_cache_layouts(get_current_attn_backends(vllm_config))
    return supported


def _planned(engine_config: Any, built: Sequence[_Built]) -> Iterator[PlannedWorker]:
    """The engine core's part: one layout, groups and memory for all workers; then each worker's own."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    core = engine_config
    with set_current_vllm_config(core):
        register_all_kvcache_specs(core)
        specs = [worker.specs for worker in built]
        layout = resolve_kv_cache_layout(
            core, [list(worker.layouts) for worker in built], [spec for each in specs for spec in each.values()]
        )
        memory_bytes = core.cache_config.kv_cache_memory_bytes or PLENTY_BYTES
        configs = get_kv_cache_configs(core, [dict(each) for each in specs], [memory_bytes] * len(built))
    for worker, config in zip(built, configs, strict=True):
        config.kv_cache_layout = layout.name
        worker.vllm_config.cache_config.kv_cache_layout = layout.name
        yield _worker(worker, config, layout)


def _worker(built: _Built, config: Any, layout: Any) -> PlannedWorker:
    """What one worker would register."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.utils import allocate_kv_cache, prepare_kernel_block_sizes

    vllm_config = built.vllm_config
    with set_current_vllm_config(vllm_config):
        attention = [_attention_groups(vllm_config, index, group) for index, group in enumerate(config.kv_cache_groups)]
        kernel_blocks = prepare_kernel_block_sizes(config, attention)
        caches = allocate_kv_cache(config, torch.device("meta"), layout, kernel_blocks)
        shared = _shared(vllm_config)
    caches |= {name: caches[owner] for name, owner in shared.items() if owner in caches}
    parallel = vllm_config.parallel_config
    facts = tuple(
        GroupFacts(int(group.kv_cache_spec.block_size), int(kernel), tuple(sorted({each.backend.get_name() for each in of_group})))
        for group, kernel, of_group in zip(config.kv_cache_groups, kernel_blocks, attention, strict=True)
    )
    offer = observe(config, caches, vllm_config=vllm_config)
    pp_rank, tp_rank = divmod(built.rank, parallel.tensor_parallel_size)
    return PlannedWorker(tp_rank, pp_rank, offer, facts)


def _attention_groups(vllm_config: Any, index: int, group: Any) -> list[Any]:
    """The layers of a group by attention backend and spec, as vLLM's worker keeps them."""
    from vllm.v1.worker.utils import AttentionGroup

    layers = vllm_config.compilation_config.static_forward_context
    kinds: dict[tuple[Any, Any], list[str]] = {}
    if not group.kv_cache_spec.has_layer_views:
        return []
    for name, spec in compat.leaf_specs(group).items():
        kinds.setdefault((layers[name].get_attn_backend(), spec), []).append(name)
    return [AttentionGroup(backend, names, spec, index) for (backend, spec), names in kinds.items()]


def _shared(vllm_config: Any) -> Mapping[str, str]:
    """Layers that use another layer's cache, with its owner."""
    from vllm.v1.worker.gpu.attn_utils import get_shared_kv_cache_layers

    shared: Mapping[str, str] = get_shared_kv_cache_layers(vllm_config)
    return shared
