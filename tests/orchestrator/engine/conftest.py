"""The installed vLLM, imported when a test first asks: that takes seconds, and collecting tests must not."""

import warnings
from importlib.util import find_spec
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def planning() -> ModuleType:
    """`tests.orchestrator.engine.planning`; a skip where vLLM is not installed."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports warn, and warnings are errors here
        from tests.orchestrator.engine import planning
    return planning
