"""Every test here needs a CUDA device, and says so where there is none."""

from pathlib import Path

import pytest
import torch

from tests.lmcache.conftest import THEIR_WARNING  # imports LMCache, if it is there, as quietly as for the tests beside a server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what lies in this folder on a machine without a device; asking for `-m gpu` there runs nothing and shows why."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(THEIR_WARNING))
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
