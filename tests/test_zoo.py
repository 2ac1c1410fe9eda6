"""The zoo: configurations written for this project, each with the place where its facts are published."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

ZOO = Path(__file__).parent / "zoo"
MODELS = sorted(path.parent.name for path in ZOO.glob("*/config.json"))
BF16, FP32 = 2, 4


def config(model: str) -> dict[str, Any]:
    """One model's `config.json`, as a reader of JSON sees it."""
    loaded: dict[str, Any] = json.loads((ZOO / model / "config.json").read_text())
    return loaded


@pytest.mark.parametrize("model", MODELS)
def test_a_configuration_says_what_it_is_and_where_that_is_published(model: str) -> None:
    """An engine finds one architecture, its type and its size; a reader finds the model, its use here and its sources."""
    found = config(model)
    facts = found["_facts"]
    assert len(found["architectures"]) == 1
    assert found["architectures"][0].endswith(("ForCausalLM", "ForConditionalGeneration"))
    assert found["model_type"]
    assert found["dtype"] == "bfloat16"
    assert found["vocab_size"] > 0
    assert found.get("hidden_size", found.get("d_model", 0)) > 0
    assert set(facts) == {"model", "why", "sources", "assumed"}
    assert facts["why"]
    assert facts["sources"][0] == f"https://huggingface.co/{facts['model']}/blob/main/config.json"
    assert all(isinstance(fact, str) and fact for fact in [*facts["sources"], *facts["assumed"]])


def test_the_index_has_a_row_for_each_and_no_other() -> None:
    """The index is true: each configuration's model, use and assumptions, in the words of the file itself."""
    rows = [line for line in (ZOO / "README.md").read_text().splitlines() if line.startswith("| [")]
    assert rows == [row(model) for model in MODELS]
    assert len(rows) >= 25, "a zoo that lost its animals is noticed"


def row(model: str) -> str:
    """The line of the index that `model` must have."""
    facts = config(model)["_facts"]
    published = f"[{facts['model']}]({facts['sources'][0]})"
    return f"| [{model}]({model}/config.json) | {published} | {facts['why']} | {'; '.join(facts['assumed'])} |"


def mamba_2(heads: int, head: int, groups: int, state: int, *, kernel: int, state_bytes: int) -> int:
    """Bytes of a Mamba-2 layer's state: `kernel - 1` columns of convolution in BF16, one `[heads, head, state]` of SSM."""
    return (kernel - 1) * (heads * head + 2 * groups * state) * BF16 + heads * head * state * state_bytes


def state_bytes(model: str) -> int:
    """Bytes of one recurrent layer's state on one rank, from the configuration's own fields."""
    is_ = config(model)
    match is_["model_type"]:
        case "qwen3_5_text":  # gated delta net: queries and keys as wide as each other, then values
            keys = is_["linear_num_key_heads"] * is_["linear_key_head_dim"]
            values = is_["linear_num_value_heads"] * is_["linear_value_head_dim"]
            convolution: int = (is_["linear_conv_kernel_dim"] - 1) * (2 * keys + values) * BF16
            matrix: int = values * is_["linear_key_head_dim"] * FP32
            return convolution + matrix
        case "nemotron_h":
            heads, head = is_["mamba_num_heads"], is_["mamba_head_dim"]
            return mamba_2(heads, head, is_["n_groups"], is_["ssm_state_size"], kernel=is_["conv_kernel"], state_bytes=FP32)
        case "granitemoehybrid" | "falcon_h1":
            heads, head = is_["mamba_n_heads"], is_["mamba_d_head"]
            return mamba_2(heads, head, is_["mamba_n_groups"], is_["mamba_d_state"], kernel=is_["mamba_d_conv"], state_bytes=BF16)
        case "jamba":  # Mamba-1: every channel has its own state
            channels: int = is_["mamba_expand"] * is_["hidden_size"]
            columns: int = is_["mamba_d_conv"] - 1 + is_["mamba_d_state"]
            return channels * columns * BF16
    raise AssertionError(f"{model}: no arithmetic for {is_['model_type']}")


@pytest.mark.parametrize(
    ("model", "ranks", "block"),
    [
        ("qwen3.5-0.8b", 1, 544),
        ("qwen3.5-0.8b", 4, 272),
        ("nemotron-h-8b", 1, 1040),
        ("granite-4.0-h-small", 1, 528),
        ("falcon-h1-7b", 1, 1568),
        ("jamba-1.5-mini", 1, 80),
    ],
)
def test_a_hybrids_block_follows_from_its_fields(model: str, ranks: int, block: int) -> None:
    """The smallest multiple of 16 tokens whose attention page holds a recurrent state is the block engines report."""
    is_ = config(model)
    head = is_.get("head_dim", is_["hidden_size"] // is_["num_attention_heads"])
    kv_heads = max(1, is_["num_key_value_heads"] // ranks)  # more ranks than KV heads: each rank keeps one
    token_bytes = 2 * kv_heads * head * BF16
    assert 16 * math.ceil(state_bytes(model) / ranks / (16 * token_bytes)) == block
