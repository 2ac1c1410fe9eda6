"""Which LMCache the connector accepts."""

import pytest

pytest.importorskip("lmcache", reason="LMCache is not installed")
pytest.importorskip("vllm", reason="vLLM is not installed")

from orchestrator.connector import requirements
from orchestrator.connector.requirements import check_lmcache

pytestmark = pytest.mark.lmcache


@pytest.mark.parametrize("installed", ["0.5.6", "0.5.7rc2", "0.5.10", "0.5.6+cu12"])
def test_releases_whose_page_reading_is_known_are_accepted(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch release needs no new kvreg."""
    monkeypatch.setattr(requirements, "version", lambda name: installed)
    check_lmcache()


@pytest.mark.parametrize("installed", ["0.5.5", "0.4.7", "0.6.0", "0.6.0rc1", "1.0"])
def test_other_releases_are_refused_in_one_line_with_both_versions(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """I installed another LMCache, and the import tells me which one is needed."""
    monkeypatch.setattr(requirements, "version", lambda name: installed)
    with pytest.raises(ImportError) as refused:
        check_lmcache()
    assert installed in str(refused.value)
    assert ">=0.5.6, <0.6" in str(refused.value)
    assert "\n" not in str(refused.value)
