"""Tiny models as folders a real engine loads with dummy weights: a config.json each, nothing to download."""

import json
from pathlib import Path

from tests.lmcache import models

GDN_HYBRID: dict[str, object] = {
    **models.GDN_HYBRID,
    "num_hidden_layers": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""Three gated-delta-net layers to one full attention layer, twice; the sizes that share one padded page."""


def write(folder: Path, config: dict[str, object]) -> Path:
    """The folder with its config.json, as an engine's `model`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder
