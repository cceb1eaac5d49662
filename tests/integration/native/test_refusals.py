"""What this door refuses to start with, in one sentence that names the setting as the user wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import numpy as np

from lmcache_nvme_backend.doors.native.copies import CpuCopier
from lmcache_nvme_backend.doors.start import StartRefused
from lmcache_nvme_backend.errors import ConfigError
from tests.integration.native.room import Room, chunk_files


@pytest.mark.parametrize(
    ("change", "begins"),
    [
        ({"root_dir": "cache"}, "root_dir: found 'cache'; allowed: an absolute directory"),
        ({"root_dir": "/no/such/place"}, "root_dir: found /no/such/place"),
        ({"quota": 1}, "quota: found an unknown setting"),
        ({"quota_gib": "much"}, "quota_gib: found 'much'"),
        ({"blocks_per_chunk": 64}, "staging_mib: found 1 MiB with chunks of 2.0 MiB"),
        ({"canonical_layout": True}, "canonical_layout: found"),
        ({"hybrid": True, "admission": "second-sight"}, "admission: found second-sight with a hybrid model"),
        (
            {"hybrid": True, "blocks_per_chunk": 2},
            "blocks_per_chunk: found 2 with a model that keeps states; allowed: 1",
        ),
        ({"policy": "fail"}, "kv_load_failure_policy: found 'fail'; allowed: recompute"),
        ({"connector": "OffloadingConnector", "module": None}, "kv_connector: found another one"),
    ],
)
def test_what_cannot_work_is_one_sentence(tmp_path: Path, change: dict[str, Any], begins: str) -> None:
    """The setting, what was found, what is allowed, what to do."""
    with pytest.raises((StartRefused, ConfigError)) as caught:
        Room(**{"root": tmp_path, "hybrid": False, **change})
    assert str(caught.value).removeprefix("lmcache_nvme_backend: the start was refused: ").startswith(begins)


def test_a_device_that_gives_other_bytes_back_does_not_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test carries a chunk of every group there and back before the first request."""
    honest = CpuCopier.to_device

    def wrong(self: CpuCopier, slot: Any, layout: Any, runs: Any, mark: Any) -> None:
        np.frombuffer(slot.view, np.int8)[7] ^= 1
        honest(self, slot, layout, runs, mark)

    monkeypatch.setattr(CpuCopier, "to_device", wrong)
    with pytest.raises(StartRefused, match="self_test: found a chunk of group 0 that came back with other bytes"):
        Room(tmp_path, hybrid=True)


def test_the_self_test_leaves_nothing_behind(tmp_path: Path) -> None:
    """No chunk on the disk, no slot taken, and the pool as it was."""
    room = Room(tmp_path, hybrid=True)
    assert chunk_files(tmp_path) == []
    assert room.side.ring.free == room.side.ring.slots
    assert not any(tensor.any() for tensor in room.memory.values())
    room.close()
