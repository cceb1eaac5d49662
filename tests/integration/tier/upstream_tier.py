"""A pytest plugin that runs vLLM's own tests of a secondary tier, and of its tiering manager, on `NvmeTier`.

Upstream's tests construct their tiers themselves: the file system tier of `test_fs_tier.py` and the example tier of
`test_tiering_offloading.py`. Both names stand for `NvmeTier` here, with the arguments those take.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.example import manager as example
from vllm.v1.kv_offload.tiering.fs import manager as fs
from world import offloading_config

import lmcache_nvme_backend

_WAIT_S = 30.0


class _Tier(lmcache_nvme_backend.NvmeTier):
    """The configuration that upstream's tests leave out."""

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **given: Any) -> None:
        spec = SimpleNamespace(config=offloading_config(), blocks_per_chunk=1)
        super().__init__(spec, primary_kv_view, tier_type, quota_gib=1, model_fingerprint="test", **given)


class FileSystemTier(_Tier):
    """In place of vLLM's tier of this kind."""

    def __init__(self, n_read_threads: int = 2, n_write_threads: int = 2, **given: Any) -> None:
        super().__init__(io_threads=n_read_threads + n_write_threads, **given)
        self.file_mapper = SimpleNamespace(get_file_name=self._file_of)
        # Upstream's helper waits for this to fill.
        self._lookup_manager = SimpleNamespace(_pending_results=_Answers(self))

    def _file_of(self, key: Any) -> str:
        """The chunk's file, or a path where none is."""
        assert self.store is not None
        name = self._prefix(ReqContext(req_id="look")).key(key).hex()
        found = list(Path(self.store.directory).glob(f"*/{name}-*.kv"))
        return str(found[0]) if found else f"{self.store.directory}/{name}"


class _Answers:
    def __init__(self, tier: Any) -> None:
        self._tier = tier

    def empty(self) -> bool:
        return bool(self._tier.lookups._answers.empty())


class ExampleTier(_Tier):
    """In place of vLLM's example, which has finished when it returns."""

    def __init__(self, custom_param: int = 0, **given: Any) -> None:
        self._root = tempfile.TemporaryDirectory()
        self.completed_jobs: list[Any] = []
        super().__init__(root_dir=self._root.name, **given)

    def submit_store(self, job_metadata: Any) -> None:
        super().submit_store(job_metadata)
        self._finish()

    def submit_load(self, job_metadata: Any) -> None:
        super().submit_load(job_metadata)
        self._finish()

    def _finish(self) -> None:
        self.drain_jobs()
        self.completed_jobs.extend(super().get_finished_jobs())

    def get_finished_jobs(self) -> list[Any]:
        done, self.completed_jobs = self.completed_jobs, []
        return done

    def get_num_chunks(self) -> int:
        assert self.store is not None
        return int(self.store.usage().namespace_chunks)

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        deadline = time.monotonic() + _WAIT_S
        while (found := super().lookup(key, req_context)) is LookupResult.RETRY and time.monotonic() < deadline:
            super().on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(0.001)
        return found

    @property
    def chunks(self) -> _Chunks:
        """What upstream's tests look into."""
        return _Chunks(self)


class _Chunks:
    def __init__(self, tier: ExampleTier) -> None:
        self._tier, self._store = tier, tier.store

    def _named(self, key: Any) -> Any:
        return self._tier._prefix(ReqContext(req_id="look")).key(key)

    def __contains__(self, key: object) -> bool:
        return bool(self._store.known(self._named(key)))

    def __setitem__(self, key: Any, there: bool) -> None:
        assert self._store.put(self._named(key), memoryview(bytes(self._tier._row_bytes)), depth=0).kept


fs.FileSystemTierManager = FileSystemTier
example.ExampleSecondaryTierManager = ExampleTier
