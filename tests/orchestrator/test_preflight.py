"""A preflight's answer, from plans made by hand: what is certain, what is assumed, in every form it is printed in."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from orchestrator.check import Rejected
from orchestrator.demo import BLOCK_TOKENS, KERNEL_TOKENS, PAGE_BYTES, STATE_BYTES, offer
from orchestrator.engine.preflight.plan import KV_TRANSFER_CONFIG, GroupFacts, Planned, PlannedWorker
from orchestrator.engine.preflight.refusals import refused
from orchestrator.engine.preflight.targets import TARGETS
from orchestrator.preflight import Answer, answer, as_json, lines, places
from orchestrator.preflight_screen import markdown, preflight
from orchestrator.snapshot import read, write
from stages.errors import PreflightImpossible
from stages.model import Worker

STATE = GroupFacts(BLOCK_TOKENS, BLOCK_TOKENS, ("STATE",))
ATTENTION = GroupFacts(BLOCK_TOKENS, KERNEL_TOKENS, ("PAGED",))


def planned(*, mode: str = "align", assumed: str | None = None, ranks: int = 1) -> Planned:
    """A hybrid of three recurrent groups and one of attention, on so many ranks."""
    workers = tuple(
        PlannedWorker(
            rank, 0, replace(offer(0, "NHD", listed_states=False, mode=mode), worker=Worker(rank, ranks)), (STATE, STATE, STATE, ATTENTION)
        )
        for rank in range(ranks)
    )
    return Planned(TARGETS[assumed] if assumed else None, workers, "HybridForCausalLM", False, False, json.dumps(KV_TRANSFER_CONFIG))


def shown(told: Answer) -> str:
    console = Console(width=160, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(preflight(told))
    return captured.get()


def test_an_accepted_model_says_its_chunk_its_padding_and_the_one_line() -> None:
    """Everything an operator must set follows from the answer."""
    told = answer("hybrid", planned())
    assert told.accepted
    assert told.chunk_tokens == BLOCK_TOKENS
    assert told.padding_share == pytest.approx(0.75 * (1 - STATE_BYTES / PAGE_BYTES))
    assert told.bytes_per_token == pytest.approx(6 * (3 * STATE_BYTES + PAGE_BYTES) / BLOCK_TOKENS)
    text = shown(told)
    assert f"{BLOCK_TOKENS} logical, {KERNEL_TOKENS} kernel" in text
    assert '"kv_connector": "KVRegConnector"' in text


def test_on_an_assumed_machine_what_depends_on_it_is_marked() -> None:
    """The architecture is certain wherever it will run; a backend that another machine would pick is not."""
    here = {line.name: line.certain for line in lines(answer("hybrid", planned()))}
    there = {line.name: line.certain for line in lines(answer("hybrid", planned(assumed="cuda-sm90")))}
    assert [name for name, certain in here.items() if not certain] == ["blocks"]
    assert [name for name, certain in there.items() if certain] == ["architecture", "--kv-transfer-config"]
    assert "assumed" in shown(answer("hybrid", planned(assumed="cuda-sm90")))


def test_a_refused_model_names_the_reason_in_every_form() -> None:
    """Terminal, Markdown and JSON all say who is refused, why, and the way out."""
    told = answer("hybrid", planned(mode="none"))
    assert not told.accepted
    document = as_json(told)
    assert document["outcome"] == "rejected"
    assert document["workers"][0]["check"]["rejections"][0]["reason"] == "mamba_cache_mode"
    for text in (shown(told), markdown(told)):
        assert "mamba_cache_mode" in text
        assert "--enable-prefix-caching" in " ".join(text.replace("│", " ").split())


def test_ranks_that_register_alike_are_shown_once() -> None:
    """Eight ranks of one geometry are one table, and each is in the JSON."""
    told = answer("hybrid", planned(ranks=8))
    assert len(told.distinct) == 1
    assert "(8, alike)" in shown(told)
    assert [worker["tp_rank"] for worker in as_json(told)["workers"]] == list(range(8))


def test_markdown_cells_hold_their_text() -> None:
    """A model's name with a pipe or a backtick in it does not break a table, and every row has its heading's cells."""
    text = markdown(answer("a|b`c", planned()))
    assert "a\\|b'c" in text
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert tables
    for table in tables:
        assert {row.replace("\\|", "").count("|") for row in table} == {table[0].count("|")}


def test_a_snapshot_is_kept_for_each_rank(tmp_path: Path) -> None:
    """One worker's is the file that was named; of several, each has its rank in its name, and each replays."""
    one = places(answer("hybrid", planned()), "plan.json")
    assert [path for path, _ in one] == ["plan.json"]
    several = places(answer("hybrid", planned(ranks=2)), str(tmp_path / "plan.json"))
    assert [Path(path).name for path, _ in several] == ["plan-rank0.json", "plan-rank1.json"]
    for path, planned_offer in several:
        write(planned_offer, path)
        assert read(path).groups == planned_offer.groups


def test_a_foreign_error_is_one_line_with_the_flag_to_change() -> None:
    """Whatever an engine's code raises for a configuration is a sentence, and the flag that it names is the one to change."""
    with pytest.raises(PreflightImpossible) as told, refused():
        raise ValueError("the model's length\nis larger than 2048; lower --max-model-len or use another model")
    assert str(told.value) == "the model's length is larger than 2048; lower --max-model-len or use another model (change --max-model-len)"
    with pytest.raises(PreflightImpossible) as advised, refused():
        raise ValueError("not recognized: try `pip install --upgrade something`")
    assert advised.value.change == ""
    with pytest.raises(PreflightImpossible, match=r"config\.json lacks what its architecture needs: 'hidden_size'"), refused():
        raise KeyError("hidden_size")
    with pytest.raises(PreflightImpossible, match=r"asserts otherwise, in .*test_preflight"), refused():
        raise AssertionError


def test_a_refusal_of_kvregs_own_passes_unchanged() -> None:
    """What is said in kvreg's words already is not said again."""
    own = PreflightImpossible("no config.json", "MODEL")
    with pytest.raises(PreflightImpossible) as told, refused():
        raise own
    assert told.value is own


def test_a_rejected_worker_rejects_the_model() -> None:
    """One rank that cannot register is enough: the engine would not come up."""
    good, bad = planned(ranks=2), planned(mode="none")
    told = answer("hybrid", replace(good, workers=(good.workers[0], bad.workers[0])))
    assert not told.accepted
    assert [isinstance(checked.verdict, Rejected) for checked in told.workers] == [False, True]
    assert len(told.distinct) == 2
