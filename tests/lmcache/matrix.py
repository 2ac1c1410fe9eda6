"""The end-to-end matrix: which models, in which geometry, and what is compared."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lmcache import models
from tests.lmcache.harness import IDLE, KVREG, STOCK, Engine, Server, prompt

CHUNK = 288
"""Tokens of a chunk for every case: one block of the hybrid's tight geometry, nine blocks of 32."""

HIT_TOKENS = 3 * CHUNK
PROMPT_TOKENS = HIT_TOKENS + 8
"""A prompt that ends just past a hit: what is computed after it depends on all that was loaded."""

LOGPROB_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """A model and how an engine runs it."""

    name: str
    model: dict[str, Any]
    layout: str
    engine: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    prepare: str | None = None
    """A module to import before the engine is made, where the engine has to be prepared."""

    def spec(self, folder: Path, transfer: dict[str, Any], steps: Sequence[str]) -> dict[str, Any]:
        """What `tests.lmcache.engine` is to run. The model's folder is the case's own: its name is part of every key."""
        model = models.write_model(folder / "models" / self.name, self.model)
        return {
            "model": str(model),
            "engine": {"block_size": 32, "num_gpu_blocks_override": 160, **self.engine},
            "prepare": self.prepare,
            "transfer": transfer,
            "prompts": {"p": prompt(1, PROMPT_TOKENS), "q": prompt(2, PROMPT_TOKENS)},
            "steps": list(steps),
        }


_HYBRID = {"mamba_cache_mode": "align", "mamba_ssm_cache_dtype": "bfloat16", "num_gpu_blocks_override": 40}
"""Left to itself, vLLM keeps the state in float32 where the CPU has AVX-512's bfloat16, and blocks are 544 tokens there."""

CASES = (
    Case("gdn-tight", models.GDN_HYBRID, "pages filled by their state, one kernel page a block", _HYBRID),
    Case(
        "gdn-subpaged",
        models.GDN_HYBRID,
        "attention paged by 32 in blocks of 288",
        _HYBRID,
        {"KERNEL_BLOCK_SIZE": "32"},
        "tests.lmcache.subpaged",
    ),
    Case("llama", models.LLAMA, "one group, blocks of 32"),
    Case("sliding-window", models.SLIDING_WINDOW, "window 128 beside full attention, blocks of 32"),
    Case("mla", models.MLA, "latent attention, blocks of 16", prepare="tests.lmcache.mla_prefix_caching"),
)

TENSOR_PARALLEL = Case(
    "llama-tp2",
    models.LLAMA,
    "two workers, one KV head each",
    {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
)

BASELINE = ("p", "p", "q", "q")
"""Each prompt computed, and then again with all but its end found in the engine's own cache."""

LONG, SHORT = ("p", "reset", "q", "reset", "p", "reset", "q"), ("p", "reset", "q")
"""p, then q over its freed blocks, then both again from outside; and both again in another process."""


@dataclass(frozen=True)
class Comparison:
    """An engine's generations against the baseline's."""

    hits: tuple[int, ...]
    same_tokens: bool
    logprob_difference: float

    @property
    def equal(self) -> bool:
        """Whether a user could tell no difference."""
        return self.same_tokens and self.logprob_difference < LOGPROB_TOLERANCE


def compare(baseline: list[dict[str, Any]], seen: list[dict[str, Any]]) -> Comparison:
    """Each generation against the baseline's of the same prompt: tokens, and log-probabilities of the same tokens.

    One that loaded tokens is held against the baseline that found as many in the engine's own cache, because some
    backends round differently when they compute on from a cache; one that loaded none against the computed one.
    """
    computed = {generation["prompt"]: generation for generation in reversed(baseline)}
    found = {generation["prompt"]: generation for generation in baseline}
    pairs = [((found if generation["external_hits"] else computed)[generation["prompt"]], generation) for generation in seen]
    differences = [
        abs(position[token] - logprob) if token in position else math.inf
        for reference, generation in pairs
        for position, other in zip(reference["logprobs"], generation["logprobs"], strict=True)
        for token, logprob in other.items()
    ]
    return Comparison(
        tuple(generation["external_hits"] for generation in seen),
        all(generation["token_ids"] == reference["token_ids"] for reference, generation in pairs),
        max(differences),
    )


@dataclass(frozen=True)
class Runs:
    """What a case's engines gave: without a cache, with kvreg's connector, and with it in a fresh process."""

    baseline: list[dict[str, Any]]
    first: list[dict[str, Any]]
    fresh: list[dict[str, Any]]


def run(case: Case, folder: Path, server: Server) -> Runs:
    """Run a case's engines: the baseline beside the others, but engines of several workers, which spin while they wait, alone."""

    def with_cache() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        connector = {**KVREG, "kv_connector_extra_config": server.transfer}
        first = Engine(folder, f"{case.name}-first", case.spec(folder, connector, LONG), case.variables).result()
        return first, Engine(folder, f"{case.name}-fresh", case.spec(folder, connector, SHORT), case.variables).result()

    def without() -> list[dict[str, Any]]:
        return Engine(folder, f"{case.name}-baseline", case.spec(folder, IDLE, BASELINE), case.variables).result()

    case.spec(folder, IDLE, ())  # writes the model, before two threads would
    if "tensor_parallel_size" in case.engine:
        return Runs(without(), *with_cache())
    with ThreadPoolExecutor(1) as beside:
        cached = beside.submit(with_cache)
        return Runs(without(), *cached.result())


def run_stock(case: Case, folder: Path, server: Server) -> list[dict[str, Any]]:
    """The same with LMCache's own connector. Fails where its engine does. The server must hold nothing of this case."""
    connector = {**STOCK, "kv_connector_extra_config": server.transfer}
    return Engine(folder, f"{case.name}-stock", case.spec(folder, connector, LONG), case.variables).result()
