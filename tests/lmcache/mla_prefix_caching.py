"""Imported before an engine is made: MLA on CPU keeps its own prefix cache, which vLLM turns off there.

Its kernels do not compute the same after a hit as without one, which is why kvreg refuses such an engine. Here it shows that
the bytes are right: what was loaded from outside is held against what was found in the engine's own cache, and computed on
from in the same way.
"""

from typing import Any

from vllm.platforms.cpu import CpuPlatform

_stock = CpuPlatform.check_and_update_config


def _check_and_update_config(vllm_config: Any) -> None:
    asked = vllm_config.cache_config.enable_prefix_caching
    _stock(vllm_config)
    vllm_config.cache_config.enable_prefix_caching = asked


CpuPlatform.check_and_update_config = staticmethod(_check_and_update_config)
