"""A real engine, a real LMCache server and kvreg's connector: what is loaded from outside changes nothing that a user sees."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.check import Rejected, check
from orchestrator.snapshot import read
from stages.errors import Reason
from tests.lmcache.harness import IDLE, KVREG, Engine, Server, server
from tests.lmcache.matrix import BASELINE, CASES, CHUNK, HIT_TOKENS, TENSOR_PARALLEL, Case, compare, run, run_stock

pytestmark = [pytest.mark.lmcache, pytest.mark.engine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, logs and results of all engines."""
    return tmp_path_factory.mktemp("end_to_end")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Server]:
    """One server for all cases: each case's model has a name of its own."""
    with server(folder, CHUNK) as one:
        yield one


@pytest.mark.parametrize("case", [*CASES, TENSOR_PARALLEL], ids=lambda case: case.name)
def test_what_is_loaded_from_outside_generates_what_computing_would(case: Case, folder: Path, running: Server) -> None:
    """My prompt comes back from LMCache, in this process and in a fresh one, and every token and log-probability is as computed."""
    runs = run(case, folder, running)
    assert [(one["external_hits"], one["cached_tokens"]) for one in runs.baseline] == [(0, 0), (0, HIT_TOKENS)] * 2
    first, fresh = compare(runs.baseline, runs.first), compare(runs.baseline, runs.fresh)
    assert first.hits == (0, 0, HIT_TOKENS, HIT_TOKENS)
    assert fresh.hits == (HIT_TOKENS, HIT_TOKENS)
    assert first.equal, first
    assert fresh.equal, fresh


def test_an_engine_that_would_not_read_what_it_loads_is_refused(folder: Path, running: Server) -> None:
    """MLA on a CPU whose kernels know no cached prefix: the engine ends at once and says why, before any wrong answer."""
    # vLLM turns it off itself where the CPU has no tiles for these kernels, and leaves it on where it has.
    case = replace(CASES[-1], name="mla-as-it-is", prepare=None, engine={"enable_prefix_caching": False})
    engine = Engine(folder, case.name, case.spec(folder, {**KVREG, "kv_connector_extra_config": running.transfer}, ("p",)))
    assert engine.wait() != 0
    assert "prefix_unread (device=cpu" in engine.text
    assert "serve this model without a KV connector, or on a GPU" in engine.text


def test_this_comparison_can_fail(folder: Path, running: Server) -> None:
    """LMCache's own connector, on the same hybrid and the same server, loads what was never computed; the comparison sees it."""
    hybrid = replace(CASES[0], name="gdn-tight-stock")
    baseline = Engine(folder, "gdn-tight-stock-baseline", hybrid.spec(folder, IDLE, BASELINE)).result()
    stock = compare(baseline, run_stock(hybrid, folder, running))
    assert sum(stock.hits) > 0
    assert not stock.equal


def test_one_refused_worker_bypasses_the_cache_and_the_engine_serves(folder: Path, running: Server) -> None:
    """One of my two workers is refused; with bypass the engine answers as without a cache, and says why in log, ledger and snapshot."""
    case = replace(TENSOR_PARALLEL, name="llama-tp2-refused")
    kept = folder / "kept"
    extra = {**running.transfer, "kvreg.on_refusal": "bypass", "kvreg.snapshot_dir": str(kept), "kvreg.ledger_dir": str(kept)}
    transfer = {
        **KVREG,
        "kv_connector": "OneRefused",
        "kv_connector_module_path": "tests.lmcache.one_refused",
        "kv_connector_extra_config": extra,
    }
    steps = ("p", "reset", "q", "reset", "p")
    baseline = Engine(folder, "refused-baseline", case.spec(folder, IDLE, steps), case.variables).result()
    refused = Engine(folder, "refused", case.spec(folder, transfer, steps), case.variables)
    compared = compare(baseline, refused.result())
    assert compared.hits == (0, 0, 0)
    assert compared.equal, compared
    assert "layer_without_cache" in refused.text
    # The refused worker, the scheduler that it told, and the worker that the scheduler told.
    assert refused.text.count("bypassed, the engine serves without the external cache") == 3
    bypassed = [line for file in kept.glob("*.prom") for line in file.read_text().splitlines() if line.startswith("kvreg_bypassed{")]
    assert any(line.endswith(" 1.0") for line in bypassed), bypassed
    snapshots = {json.loads(file.read_text())["worker"]["rank"]: file.name for file in kept.glob("*.kvreg.json")}
    assert snapshots[0].endswith("registered.kvreg.json")
    assert snapshots[1].endswith("refused.kvreg.json")


def test_a_chunk_that_fits_no_block_stops_the_engine_with_the_chunk_that_would(folder: Path, running: Server) -> None:
    """My server's chunk does not fit this model's blocks: the engine ends at once, and its last error names the size to set."""
    case = replace(CASES[2], name="llama-chunk", engine={"block_size": 64})
    kept = folder / "kept-at-start"
    transfer = {**KVREG, "kv_connector_extra_config": {**running.transfer, "kvreg.snapshot_dir": str(kept)}}
    engine = Engine(folder, "llama-chunk", case.spec(folder, transfer, ("p",)))
    assert engine.wait() != 0
    assert f"chunk_size_tokens={CHUNK} tokens_per_block=64" in engine.text
    assert "set LMCache's chunk size to 64 tokens or a multiple of it" in engine.text
    snapshots = list(kept.iterdir())
    assert snapshots
    for file in snapshots:
        replayed = check(read(file))
        assert isinstance(replayed, Rejected)
        assert {(rejection.reason, rejection.facts["chunk_size_tokens"]) for rejection in replayed.rejections} == {
            (Reason.CHUNK_SIZE, CHUNK)
        }
        assert file.name.endswith("refused.kvreg.json")
