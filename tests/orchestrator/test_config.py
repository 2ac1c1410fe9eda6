"""The connector's settings."""

import pickle
from pathlib import Path

import pytest

from orchestrator.config import SETTINGS, ConfigError, KVRegConfig, LogFormat, OnRefusal


def test_without_settings_the_defaults_hold_and_lmcaches_keys_are_left_alone() -> None:
    """I set only LMCache's own keys, and kvreg stops the engine on a refusal, as documented."""
    assert KVRegConfig.parse({"lmcache.mp.port": 5555, "lmcache.mp.nonsense": 1}) == KVRegConfig(on_refusal=OnRefusal.STOP)


def test_every_setting_is_read() -> None:
    """Each key I set is what the connector sees."""
    extra = {
        "kvreg.on_refusal": "bypass",
        "kvreg.register_timeout_s": 30,
        "kvreg.snapshot_dir": "/var/lib/kvreg",
        "kvreg.snapshot_limit": 3,
        "kvreg.ledger_dir": "/var/lib/node_exporter",
        "kvreg.instance": "pod-7",
        "kvreg.log_format": "text",
    }
    assert set(extra) == set(SETTINGS)
    assert KVRegConfig.parse(extra) == KVRegConfig(
        OnRefusal.BYPASS, 30.0, Path("/var/lib/kvreg"), 3, Path("/var/lib/node_exporter"), "pod-7", LogFormat.TEXT
    )


def test_every_problem_is_told_at_once_with_the_nearest_key() -> None:
    """I mistyped three things, and one start tells me all three."""
    with pytest.raises(ConfigError) as told:
        KVRegConfig.parse({"kvreg.on_refusl": "bypass", "kvreg_snapshot_dir": "/x", "kvreg.register_timeout_s": "soon"})
    assert "kvreg.on_refusl is no setting: did you mean kvreg.on_refusal?" in str(told.value)
    assert "kvreg_snapshot_dir is no setting: did you mean kvreg.snapshot_dir?" in str(told.value)
    assert "kvreg.register_timeout_s must be a number of seconds above 0, not 'soon'" in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("on_refusal", "ignore"),
        ("on_refusal", True),
        ("on_refusal", ["stop"]),
        ("register_timeout_s", 0),
        ("register_timeout_s", True),
        ("register_timeout_s", float("nan")),
        ("register_timeout_s", float("inf")),
        ("snapshot_limit", 0),
        ("snapshot_limit", 1.5),
        ("snapshot_limit", True),
        ("snapshot_dir", ""),
        ("snapshot_dir", None),
        ("instance", 7),
        ("log_format", "yaml"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_its_key(key: str, value: object) -> None:
    """A setting I gave a senseless value is named, with what it must be."""
    with pytest.raises(ConfigError, match=f"kvreg.{key} must be "):
        KVRegConfig.parse({f"kvreg.{key}": value})


def test_the_error_survives_pickling() -> None:
    """The error reaches me from a worker process as it was raised."""
    error = ConfigError(("kvreg.x is no setting: did you mean kvreg.instance?",))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
