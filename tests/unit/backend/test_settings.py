"""Settings: what is accepted, and the one clear error for what is not."""

from typing import Any

import pytest

from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.settings import NvmeSettings, names_this_backend, parse_settings, parse_tier_settings

GOOD = {"nvme.path": "/mnt/kv", "nvme.quota_gib": 64}


def parse(**changes):
    return parse_settings({**GOOD, **{f"nvme.{k}": v for k, v in changes.items()}})


def test_defaults_are_the_documented_ones():
    """Path and quota are enough."""
    assert parse() == NvmeSettings(path="/mnt/kv", quota_gib=64.0)


def test_keys_of_others_are_left_alone():
    """extra_config is shared: only nvme.* belongs to us."""
    assert (
        parse_settings({**GOOD, "lookup_backoff_time": 3, "storage_plugin.nvme.class_name": "NvmeBackend"}) == parse()
    )


@pytest.mark.parametrize("written, meant", [(True, "on"), (False, "off"), ("auto", "auto")])
def test_direct_io_survives_yaml_booleans(written, meant):
    """`nvme.direct_io: on` is true for a YAML parser."""
    assert parse(direct_io=written).direct_io == meant


def test_numbers_written_as_text_are_numbers():
    """Environment variables carry text."""
    assert parse(quota_gib="1.5", staging_mib="128").quota_bytes == int(1.5 * 2**30)


def test_an_unknown_key_names_its_nearest_neighbour():
    """A typo is an error, not a silently ignored setting."""
    with pytest.raises(ConfigError, match=r"nvme\.quota_gb.*Did you mean nvme\.quota_gib\?"):
        parse(quota_gb=3)


@pytest.mark.parametrize(
    "setting, value",
    [
        ("path", "relative/dir"),
        ("quota_gib", 0),
        ("quota_gib", -1),
        ("quota_gib", float("nan")),
        ("quota_gib", float("inf")),
        ("quota_gib", "lots"),
        ("staging_mib", 0),
        ("staging_mib", 1.5),
        ("io_threads", 0),
        ("io_threads", 65),
        ("direct_io", "maybe"),
        ("fsync", "full"),
        ("codec", "gzip"),
        ("store_wait_ms", -1),
        ("on_init_error", "ignore"),
    ],
)
def test_a_bad_value_is_one_error_that_names_the_setting(setting, value):
    """The error says which setting, what was found and what is allowed."""
    with pytest.raises(ConfigError) as caught:
        parse(**{setting: value})
    assert caught.value.setting == f"nvme.{setting}"
    assert caught.value.allowed and caught.value.todo
    assert str(value) in str(caught.value)


@pytest.mark.parametrize("missing", ["path", "quota_gib"])
def test_what_is_required_is_asked_for(missing):
    """No default could be right for the place and the size."""
    with pytest.raises(ConfigError, match=f"nvme.{missing}"):
        parse_settings({k: v for k, v in GOOD.items() if k != f"nvme.{missing}"})


def test_a_quota_below_the_ring_is_refused():
    """Such a store could not hold what one step writes."""
    with pytest.raises(ConfigError, match=r"nvme\.quota_gib"):
        parse(quota_gib=0.1, staging_mib=256)


def test_only_an_active_plugin_counts_as_named():
    """A module path of a plugin that is not listed in storage_plugins configures nothing."""
    extra = {"storage_plugin.nvme.module_path": "lmcache_nvme_backend"}
    assert names_this_backend(extra, ["nvme"])
    assert not names_this_backend(extra, [])
    assert not names_this_backend(extra, ["other"])
    assert not names_this_backend(None, None)


# --- the dictionaries of the other doors


def test_tier_dictionary_has_the_same_settings_without_the_prefix() -> None:
    """What a door needs for itself is left out, its defaults give way to what is given."""
    config = {"type": "NvmeTier", "root_dir": "/mnt/kv", "quota_gib": 4, "direct_io": True, "codec": "zstd"}
    settings = parse_tier_settings(config, ("type",), where="the tier", staging_mib=1, codec="none")
    assert (settings.path, settings.quota_gib, settings.direct_io) == ("/mnt/kv", 4, "on")
    assert (settings.staging_mib, settings.codec) == (1, "zstd")


@pytest.mark.parametrize(
    ("config", "setting", "todo"),
    [
        ({"quota_gib": 4}, "root_dir", "Set root_dir under the tier."),
        ({"root_dir": "/mnt"}, "quota_gib", "Set quota_gib under the tier."),
        ({"root_dir": "mnt", "quota_gib": 4}, "root_dir", "Write the path from the root."),
        ({"root_dir": "/mnt", "quota_gib": 4, "quota_gb": 4}, "quota_gb", "Did you mean quota_gib?"),
        ({"path": "/mnt", "quota_gib": 4}, "root_dir", "Rename it to root_dir."),
        ({"root_dir": "/mnt", "quota_gib": 0.1}, "quota_gib", "Raise quota_gib or lower staging_mib."),
    ],
)
def test_tier_dictionary_error_has_its_names(config: dict[str, Any], setting: str, todo: str) -> None:
    """A message never sends a person to a key that the dictionary does not have."""
    with pytest.raises(ConfigError) as caught:
        parse_tier_settings(config, where="the tier")
    assert (caught.value.setting, caught.value.todo) == (setting, todo)
    assert "nvme." not in str(caught.value)
