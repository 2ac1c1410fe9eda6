"""LMCache and vLLM are imported once here: what their own imports warn of is theirs, what their use warns of is ours."""

import importlib.util
import os
import warnings
from pathlib import Path

import pytest

_MISSING = [name for name in ("lmcache", "vllm") if importlib.util.find_spec(name) is None]
THEIR_WARNING = "ignore:.LoggingHandler. in .opentelemetry-sdk. is deprecated:DeprecationWarning"
"""Raised wherever LMCache imports a module of its own for the first time, which may be in the middle of a test."""

if not _MISSING:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import orchestrator.connector  # noqa: F401

collect_ignore_glob = ["test_*.py"] if _MISSING and not os.environ.get("CI") else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let that one warning pass in the tests of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(THEIR_WARNING))
