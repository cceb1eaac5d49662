"""What the front process says of a command line that names the native door, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmcache_nvme_backend.doors.native.settings import check_front, names_this_door
from lmcache_nvme_backend.errors import ConfigError


def transfer(root: Path, **changes: Any) -> dict[str, Any]:
    extra = {"spec_name": "NvmeOffloadingSpec", "spec_module_path": "lmcache_nvme_backend", "root_dir": str(root)}
    return {
        "kv_connector": "NvmeOffloadingConnector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**extra, "quota_gib": 1, "blocks_per_chunk": 16, **changes.pop("extra", {})},
        **changes,
    }


def test_only_a_command_line_that_names_it_is_looked_at(tmp_path: Path) -> None:
    """Spec or connector; either alone is a mistake that has to be told."""
    assert names_this_door(transfer(tmp_path))
    assert names_this_door({"kv_connector": "NvmeOffloadingConnector"})
    assert names_this_door({"kv_connector_extra_config": {"spec_name": "NvmeOffloadingSpec"}})
    assert not names_this_door({"kv_connector": "OffloadingConnector"})
    assert not names_this_door({})


def test_what_works_passes_with_vllms_own_keys_in_it(tmp_path: Path) -> None:
    """`offload_prompt_only`, `blocks_per_chunk` and the like are vLLM's to check."""
    check_front(transfer(tmp_path, extra={"offload_prompt_only": False, "staging_mib": 64}))


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"extra": {"quota_gib": None}}, "quota_gib"),
        ({"extra": {"root_dir": "/no/such/place"}}, "root_dir"),
        ({"extra": {"stagingmib": 4}}, "stagingmib"),
        ({"extra": {"sync_load_budget_bytes": 1}}, "sync_load_budget_bytes"),
        ({"kv_connector": "OffloadingConnector"}, "kv_connector"),
        ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy"),
    ],
)
def test_what_cannot_work_is_named_as_it_was_written(tmp_path: Path, changes: dict[str, Any], setting: str) -> None:
    """One error, with what to do."""
    with pytest.raises(ConfigError) as caught:
        check_front(transfer(tmp_path, **changes))
    assert caught.value.setting == setting


def test_vllms_default_policy_is_refused_too(tmp_path: Path) -> None:
    """It ends a request whose load fails."""
    given = transfer(tmp_path)
    del given["kv_load_failure_policy"]
    with pytest.raises(ConfigError, match="kv_load_failure_policy"):
        check_front(given)
