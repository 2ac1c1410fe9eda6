"""One real engine in a process of its own: `python -m tests.lmcache.engine SPEC OUT`, both JSON files.

SPEC: `{"model", "engine": {…}, "prepare": module, "transfer": {…}, "prompts": {name: token ids}, "steps": [prompt name | "reset", …]}`.
OUT: one entry a generated prompt: `{"prompt", "token_ids", "logprobs", "external_hits", "cached_tokens"}`, the tokens that
this step loaded from the external cache, and those it had not to compute for any reason.
"""

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

SETTLE_TIMEOUT_S = 900.0
"""How long blocks may stay held by a store; far more than a store takes."""


def main(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the steps; what each generated prompt gave."""
    from vllm import LLM, SamplingParams

    let_modules_be_scanned()
    if spec["prepare"]:
        import_module(spec["prepare"])
    engine = LLM(
        spec["model"],
        **{
            "load_format": "auto",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "bfloat16",
            "seed": 0,
            "max_model_len": 2048,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 4,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "kv_transfer_config": spec["transfer"],
            **spec["engine"],
        },
    )
    sampling = SamplingParams(max_tokens=8, temperature=0, logprobs=5, detokenize=False, ignore_eos=True)
    seen = []
    for step in spec["steps"]:
        if step == "reset":
            settle(engine)
        else:
            before = external_hits(engine)
            request = engine.generate([{"prompt_token_ids": spec["prompts"][step]}], sampling, use_tqdm=False)[0]
            output = request.outputs[0]
            seen.append(
                {
                    "prompt": step,
                    "token_ids": list(output.token_ids),
                    "logprobs": [{str(token): value.logprob for token, value in position.items()} for position in output.logprobs],
                    "external_hits": external_hits(engine) - before,
                    "cached_tokens": request.num_cached_tokens,
                }
            )
        print(f"step {step} done", flush=True)
    return seen


def let_modules_be_scanned() -> None:
    """vLLM 0.32 on CPU reads `__dict__` of all that loaded modules hold, and llvmlite's library object makes one up.

    Engines of one process meet it; those that spawn their workers do not, and take three times as long to start.
    """
    try:
        from llvmlite.binding.ffi import lib
    except ImportError:
        return
    answer = type(lib).__getattr__

    def honest(library: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return answer(library, name)

    type(lib).__getattr__ = honest  # type: ignore[method-assign]


def settle(engine: Any) -> None:
    """Drop every locally cached block, once no store holds one: what is found afterwards came from outside.

    A store's blocks are freed in a step, so tiny requests keep the engine stepping until the reset is let through; the
    tiny request's own block is freed in the step after it.
    """
    from vllm import SamplingParams

    tiny = SamplingParams(max_tokens=1, detokenize=False, ignore_eos=True)
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while not engine.reset_prefix_cache():
        assert time.monotonic() < deadline, "blocks are still held by a store"
        engine.generate([{"prompt_token_ids": [1, 2, 3]}], tiny, use_tqdm=False)
        engine.llm_engine.step()


def external_hits(engine: Any) -> int:
    """Prompt tokens loaded from the external cache so far."""
    return sum(int(metric.value) for metric in engine.get_metrics() if metric.name == "vllm:external_prefix_cache_hits")


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
