"""Run one real engine with the probe connector and write what it saw as JSON: `python -m tests.engine.run MODEL REPORT`.

A program of its own, because an engine is started once per process and spawns others.
"""

import json
import sys
from pathlib import Path

PROMPT_TOKENS = 700
"""Past one block of every geometry used here, so that each group has whole blocks and a part.

A block's tokens would depend on the CPU if the state's dtype did: left to itself, vLLM keeps it in float32 where there is
AVX-512's bfloat16.
"""


def main(model: str, report: Path) -> None:
    """Generate, round-trip the request's blocks, generate again over the restored blocks, report."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        seed=0,
        max_model_len=2048,
        max_num_batched_tokens=2048,
        max_num_seqs=2,
        num_gpu_blocks_override=32,
        enable_prefix_caching=True,
        mamba_cache_mode="align",
        mamba_ssm_cache_dtype="bfloat16",
        worker_extension_cls="tests.engine.probe.ProbeWorker",
        kv_transfer_config={"kv_connector": "Probe", "kv_connector_module_path": "tests.engine.probe", "kv_role": "kv_both"},
    )
    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
    prompt = {"prompt_token_ids": [1 + (index * 7) % 1000 for index in range(PROMPT_TOKENS)]}
    first = engine.generate([prompt], sampling)[0].outputs[0].token_ids
    (seen,) = engine.collective_rpc("probe_round_trip")
    (plan,) = engine.collective_rpc("probe_plan")
    again = engine.generate([prompt], sampling)[0]
    same_tokens = list(first) == list(again.outputs[0].token_ids)
    report.write_text(json.dumps({**seen, **plan, "same_tokens": same_tokens, "cached_tokens": again.num_cached_tokens}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
