"""Every test here needs a CUDA device, and says so where there is none."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what lies in this folder on a machine without a device; asking for `-m gpu` there runs nothing and shows why."""
    if torch.cuda.is_available():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
