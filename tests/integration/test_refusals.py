"""What the plugin refuses at start: the constructor fails with the reason, and nothing is left behind."""

import threading
from pathlib import Path

import pytest

from lmcache_nvme_backend.doors import lmcache_compat, start
from lmcache_nvme_backend.doors.lmcache_backend import NvmeBackend
from lmcache_nvme_backend.errors import ConfigError

from .conftest import lmcache_config, lmcache_metadata


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def construct(path, **changes):
    return NvmeBackend(config=lmcache_config(path, **changes), metadata=lmcache_metadata(), dst_device="cpu")


@pytest.mark.parametrize(
    "changes, setting",
    [
        ({"use_layerwise": True}, "use_layerwise"),
        ({"enable_pd": True, "pd_role": None}, "enable_pd"),
        ({"enable_blending": True}, "enable_blending"),
        ({"quota_gb": 3}, "nvme.quota_gb"),
        ({"path": "/no/such/directory"}, "nvme.path"),
        ({"path": "relative"}, "nvme.path"),
        ({"model_fingerprint": None}, "nvme.model_fingerprint"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_configuration_that_cannot_work_is_refused_by_name(tmp_path, changes, setting):
    """One error that names the setting; it is kept for the adaptation that may raise it."""
    changes.pop("pd_role", None)
    start.take_failure()
    path = changes.pop("path", tmp_path)
    with pytest.raises(ConfigError) as caught:
        construct(path, **changes)
    assert caught.value.setting == setting
    assert start.take_failure() is caught.value


def test_a_ring_smaller_than_two_chunks_says_what_would_work(tmp_path, monkeypatch):
    """The smallest size that works is in the message."""
    metadata = lmcache_metadata()
    metadata.kv_shape = (64, 2, 256, 8, 128)  # 64 MiB a chunk
    with pytest.raises(ConfigError, match=r"nvme\.staging_mib.*Set it to 128 or more"):
        NvmeBackend(config=lmcache_config(tmp_path, staging_mib=100), metadata=metadata, dst_device="cpu")


def test_a_write_budget_that_no_chunk_fits_in_is_refused(tmp_path):
    """A quarter of it is all that may come at once; the smallest that works is in the message."""
    metadata = lmcache_metadata()
    metadata.kv_shape = (64, 2, 256, 8, 128)  # 64 MiB a chunk
    with pytest.raises(ConfigError, match=r"nvme\.write_budget_gib_per_day.*Set it to 0\.251 or more"):
        NvmeBackend(
            config=lmcache_config(tmp_path, staging_mib=128, write_budget_gib_per_day=0.25),
            metadata=metadata,
            dst_device="cpu",
        )


def test_a_refused_start_leaves_no_thread_and_no_descriptor(tmp_path):
    """Everything opened before the error is closed again."""
    (tmp_path / "file").write_text("")
    threads, fds = threading.active_count(), descriptors()
    for _ in range(5):
        with pytest.raises(ConfigError):
            construct(tmp_path / "file")
    assert threading.active_count() == threads
    assert descriptors() <= fds + 1


def test_every_adaptation_knows_the_installed_lmcache():
    """The same function tells `kvtier patch status`."""
    lmcache_compat.apply_all(with_vllm=True)
    states = {row["id"]: row["state"] for row in lmcache_compat.adaptations()}
    assert set(states.values()) == {"applied"}
    assert len(states) == len(lmcache_compat.ADAPTATIONS)


def test_unknown_code_is_refused_with_the_version_and_the_range(monkeypatch):
    """An LMCache whose function looks different is not wrapped."""
    from lmcache.v1.storage_backend.storage_manager import StorageManager

    monkeypatch.setattr(StorageManager, "_get_allocator_backend", lambda self, other_name: None)
    with pytest.raises(ConfigError, match=r"0\.5\.4 to 0\.5\.6"):
        lmcache_compat.apply_all(with_vllm=False)
