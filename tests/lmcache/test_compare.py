"""kvreg and LMCache on the same registrations: kvreg is right in all of them, and the judge is no rubber stamp."""

import json
import logging
import os
import warnings
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests import oracle
from tests.lmcache.compare import CASES, Verdict, compared, complaint, document

pytestmark = pytest.mark.lmcache


@pytest.fixture(scope="module")
def found() -> Iterator[list[tuple[str, str, Verdict, Verdict, str]]]:
    """Every verdict, with LMCache quiet: it logs every group of every registration."""
    if find_spec("lmcache") is None or find_spec("vllm") is None:
        if os.environ.get("CI"):
            pytest.fail("LMCache or vLLM is not installed")
        pytest.skip("LMCache or vLLM is not installed")
    logging.disable(logging.INFO)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # LMCache's imports may warn, and warnings are errors here
        yield list(compared())
    logging.disable(logging.NOTSET)


def test_kvreg_is_right_by_bytes_wherever_it_accepts(found: list[tuple[str, str, Verdict, Verdict, str]]) -> None:
    """By the descriptors that LMCache makes of kvreg's views, each block of each accepted registration is copied whole and alone."""
    assert len(found) > 400
    assert [(case, kind) for case, kind, ours, _, _ in found if ours is not Verdict.RIGHT] == []


def test_the_peer_is_run_and_not_only_refused(found: list[tuple[str, str, Verdict, Verdict, str]]) -> None:
    """The adapter is good enough for LMCache to be right in most cases; what it says no to is said in its own words."""
    assert sum(theirs is Verdict.RIGHT for _, _, _, theirs, _ in found) > len(found) / 2
    assert all(why.startswith(("ValueError", "NotImplementedError")) for _, _, _, theirs, why in found if theirs is Verdict.REFUSED)


def test_the_table_counts_every_case(found: list[tuple[str, str, Verdict, Verdict, str]]) -> None:
    """The last line of the table sums up as many verdicts as there are."""
    last = next(line for line in document(found).splitlines() if line.startswith("| all"))
    total, right, *theirs = (int(cell) for cell in last.strip("| ").split("|")[2:])
    assert total == right == sum(theirs) == len(found)


@pytest.mark.parametrize(
    ("start", "stop", "said"), [(1, 0, "not copied"), (0, -1, "not copied"), (-1, 0, "of somebody else"), (0, 1, "somebody else")]
)
def test_the_judge_sees_one_byte(start: int, stop: int, said: str) -> None:
    """A block that is copied a byte short or a byte further, at either end, is complained about; as it is, it is not."""
    snapshot = json.loads((CASES / "0.33.0-LBNHC-dense-fa16.json").read_text())
    group = snapshot["groups"][0]
    name = group["layer_names"][0]
    own = oracle.owned(snapshot["kv_caches"][name], group["spec"], group["num_blocks"], 1)
    ((low, high),) = own
    judge = (snapshot, name, group["spec"], group["num_blocks"], 1)
    assert not complaint(*judge, own)
    assert said in complaint(*judge, [(low + start, high + stop)])
