"""``NvmeL2Adapter``: the chunk store as an L2 plugin of LMCache's multi-process server.

LMCache's two controller threads submit tasks and are woken by a descriptor when one has ended. Here a submit does
nothing but hand the task to a pool: lookups have threads of their own, so that one never waits behind the loads of
another request; loads go an object a thread, stores a batch a thread, so that a prefix is written head first. An
object's memory is LMCache's and is touched only until its task has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface

from lmcache_nvme_backend.doors.lmcache_compat import lmcache_version
from lmcache_nvme_backend.doors.mp import exported
from lmcache_nvme_backend.doors.mp.identity import ModelIdentities
from lmcache_nvme_backend.doors.mp.loading import Loader
from lmcache_nvme_backend.doors.mp.lookups import Found, Lookups
from lmcache_nvme_backend.doors.mp.objects import Lease
from lmcache_nvme_backend.doors.mp.params import MpSettings, parse_params
from lmcache_nvme_backend.doors.mp.read_through import ReadThrough
from lmcache_nvme_backend.doors.mp.remote import Remote, parse_remote
from lmcache_nvme_backend.doors.mp.residents import Residents
from lmcache_nvme_backend.doors.mp.saving import Saver
from lmcache_nvme_backend.doors.mp.spaces import Chunk, Spaces
from lmcache_nvme_backend.doors.mp.task_board import TaskBoard
from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.settings import tier_names
from lmcache_nvme_backend.store import StoreSettings
from lmcache_nvme_backend.store.opening import check_root

logger = init_logger("lmcache_nvme_backend")

# A lookup is a dictionary's work, and waits for the network where a store lies behind.
LOOKUP_THREADS: Final = 4
# LMCache frees the memory of its objects after `close`: what runs then must have ended, and a disk that hangs longer
# than this would not let the server go at all.
CLOSE_WAIT_S: Final = 30.0


class NvmeL2Adapter(L2AdapterInterface):
    """Objects of LMCache's server on NVMe. Thread-safe.

    Raises (constructor):
        ConfigError: whatever a person can put right. LMCache's server does not start then.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        self.settings: MpSettings = parse_params(params)
        tier = self.settings.tier
        behind = self.settings.behind and parse_remote(self.settings.behind)
        self.degraded = ""
        try:
            _check_lmcache()
            with tier_names():
                check_root(Path(tier.path), StoreSettings(tier.quota_bytes))
        except ConfigError as e:
            if tier.on_init_error == "fail":
                raise
            self.degraded = str(e)
            logger.error("lmcache_nvme_backend: DEGRADED: nothing is stored or served (on_init_error: degrade): %s", e)
        super().__init__(max_capacity_bytes=tier.quota_bytes)
        self.spaces = Spaces(tier, ModelIdentities(tier.model_fingerprint, self.settings.unmarked_models == "by-path"))
        self.residents = Residents()
        self._lookups, self._loader, self._saver = Lookups(self.spaces), Loader(self.spaces), Saver(self.spaces)
        self._lookup_board: TaskBoard[Bitmap] = TaskBoard()
        self._load_board: TaskBoard[Bitmap] = TaskBoard()
        self._store_board: TaskBoard[L2StoreResult] = TaskBoard()
        self._lookup_pool = ThreadPoolExecutor(LOOKUP_THREADS, "kvtier-lookup")
        self._load_pool = ThreadPoolExecutor(tier.io_threads, "kvtier-load")
        self._store_pool = ThreadPoolExecutor(max(1, tier.io_threads // 2), "kvtier-store")
        self._pins_lock = threading.Lock()
        self._locks: dict[Any, list[Chunk | None]] = {}  # None: of a chunk that lay behind alone, not pinned here
        self._closed = self.degraded != ""
        self.behind: ReadThrough | None = None
        if self.settings.behind and not self._closed:
            self.behind = ReadThrough(
                Remote(behind, self.settings.behind["type"]),
                tier.staging_bytes,
                self.settings.behind_timeout_s,
                lambda key, chunk, nbytes: self._tell_stored([(key, chunk, nbytes)]),
            )
        exported.add(self)

    # -- descriptors --------------------------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return self._store_board.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookup_board.fd

    def get_load_event_fd(self) -> int:
        return self._load_board.fd

    # -- store --------------------------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store the objects, each in its place of the prefix. The task succeeds unless something failed that should
        have worked: what is not worth writing, or over the day's budget, is dropped and counted."""
        task, lease = TaskBoard.number(), Lease()

        def run() -> None:
            saved = self._saver.run(keys, objects, lease)
            self._tell_stored(saved.kept)
            if self.behind is not None:
                self.behind.offer(saved.new, lease)
            self._store_board.finish(task, L2StoreResult(saved.ok, saved.nbytes))

        self._submit(self._store_pool, run, lambda: self._store_board.finish(task, L2StoreResult(False, 0)))
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._store_board.take_all()

    # -- lookup -------------------------------------------------------------------------------------------------------

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        """Find and pin; a prefix with a gap is answered as it is, since LMCache's memory may fill the gap."""
        task = TaskBoard.number()

        def run() -> None:
            found = self._lookups.run(keys, group_layout_descs)
            self._pin(keys, found)
            there = self.behind.look(keys, found) if self.behind is not None else []
            self._lock_behind([key for key, is_there in zip(keys, there, strict=False) if is_there])
            self._lookup_board.finish(task, _bitmap([any(bits) for bits in zip_longest(found.here, there)]))

        self._submit(self._lookup_pool, run, lambda: self._lookup_board.finish(task, Bitmap(len(keys))))
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookup_board.take(task_id)

    def _pin(self, keys: Sequence[Any], found: Found) -> None:
        """Remember what the store has pinned, until `submit_unlock`."""
        arrived = []
        with self._pins_lock:
            for key, chunk, here in zip(keys, found.chunks, found.here, strict=True):
                if chunk is not None and here:
                    self._locks.setdefault(key, []).append(chunk)
                    arrived.append((key, chunk, found.nbytes[key.object_group_id]))
        self._tell_stored(arrived)

    def _lock_behind(self, keys: Sequence[Any]) -> None:
        """LMCache unlocks these, too, and by then another request may have pinned them here."""
        with self._pins_lock:
            for key in keys:
                self._locks.setdefault(key, []).append(None)

    def submit_unlock(self, keys: list[Any]) -> None:
        for key in keys:
            chunk = None
            with self._pins_lock:
                locks = self._locks.get(key, [])
                if None in locks:
                    locks.remove(None)
                elif locks:
                    chunk = locks.pop()
                if not locks:
                    self._locks.pop(key, None)
            if chunk is not None:
                chunk.space.pins.given_back(chunk.name)

    # -- load ---------------------------------------------------------------------------------------------------------

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Read each object into its memory. A damaged, evicted or unreadable one is a miss of its own."""
        task, lease = TaskBoard.number(), Lease()
        loaded = [False] * len(keys)
        left = _Countdown(len(keys), lambda: self._finish_load(task, keys, loaded))

        def run(i: int) -> None:
            chunk, loaded[i] = self._loader.run(keys[i], objects[i], lease)
            if loaded[i] or chunk is None or self.behind is None:
                left.one()
            else:
                self._submit(self.behind.fetchers, partial(fetch, self.behind, chunk, i), left.one)

        def fetch(behind: ReadThrough, chunk: Chunk, i: int) -> None:
            loaded[i] = not lease.over and behind.fetch(keys[i], chunk, objects[i], lease)
            left.one()

        for i in range(len(keys)):
            self._submit(self._load_pool, partial(run, i), left.one)
        if not keys:
            self._finish_load(task, keys, loaded)
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._load_board.take(task_id)

    def _finish_load(self, task: int, keys: Sequence[Any], loaded: Sequence[bool]) -> None:
        if hits := [key for key, is_loaded in zip(keys, loaded, strict=True) if is_loaded]:
            self._safely(lambda: self._notify_keys_accessed(hits))
        self._load_board.finish(task, _bitmap(loaded))

    # -- quota and usage ----------------------------------------------------------------------------------------------

    def delete(self, keys: list[Any]) -> None:
        """Remove these objects, but for those that a request has locked: they go another time."""
        removed = []
        for key in keys:
            chunk = self.residents.chunk(key)
            if chunk is None or chunk.space.pins.holds(chunk.name) or not chunk.space.store.remove(chunk.name):
                continue
            removed.append(key)
            with self._pins_lock:
                if not chunk.space.pins.holds(chunk.name):
                    self._locks.pop(key, None)  # of a request whose end nobody has told
        self._tell_deleted(self.residents.drop(removed))

    def get_usage(self) -> AdapterUsage:
        """Bytes under the root, whoever put them there, against the quota; by salt, what this server has stored or
        found since it started and still has."""
        self._tell_deleted(self.residents.gone(self.spaces.all()))
        known = super().get_usage()
        spaces = self.spaces.all()
        used = spaces[0].store.usage().used_bytes if spaces else known.total_bytes_used
        return AdapterUsage(used, self.settings.tier.quota_bytes, known.bytes_by_cache_salt)

    def _tell_stored(self, arrived: Sequence[tuple[Any, Chunk, int]]) -> None:
        if new := self.residents.add(arrived):
            self._safely(lambda: self._notify_keys_stored([key for key, _ in new], [size for _, size in new]))
        if self.residents.look_is_due:
            self._tell_deleted(self.residents.gone(self.spaces.all()))

    def _tell_deleted(self, gone: Sequence[tuple[Any, int]]) -> None:
        if gone:
            self._safely(lambda: self._notify_keys_deleted([key for key, _ in gone], [size for _, size in gone]))

    # -- end and state ------------------------------------------------------------------------------------------------

    def report_status(self) -> dict[str, Any]:
        """For LMCache's status page. Not healthy: nothing is stored or served for a reason that a person should see."""
        spaces = self.spaces.all()
        aside = [space.model for space in spaces if space.store.stands_aside]
        refused = self.spaces.refused()
        return {
            "is_healthy": not self.degraded and not aside and not refused,
            "type": "NvmeL2Adapter",
            "root_dir": self.settings.tier.path,
            "models": {space.model: space.store.usage().namespace_chunks for space in spaces},
            "refused": refused,
            "stands_aside": aside,
            "degraded": self.degraded,
            "behind": None if self.behind is None else {"type": self.behind.remote.name, "up": self.behind.remote.up},
        }

    def close(self) -> None:
        """Drop what is queued, wait for what runs, and leave the root. Idempotent."""
        self._closed = True
        pools = (self._lookup_pool, self._load_pool, self._store_pool)
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + CLOSE_WAIT_S
        for pool in pools:
            for thread in pool._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        exported.remove(self)
        if self.behind is not None:
            self.behind.close()
        self.spaces.close()
        for board in (self._lookup_board, self._load_board, self._store_board):
            board.close()

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[[], None], give_up: Callable[[], None]) -> None:
        """Run `work` in the pool; `give_up` where it cannot be run, or raises."""

        def run() -> None:
            try:
                work()
            except Exception:
                logger.exception("lmcache_nvme_backend: a task failed")
                give_up()

        if self._closed:
            give_up()
            return
        try:
            pool.submit(run)
        except RuntimeError:  # closed in between
            give_up()

    @staticmethod
    def _safely(tell: Callable[[], None]) -> None:
        """Listeners are LMCache's; one that raises must not take a result with it."""
        try:
            tell()
        except Exception:
            logger.exception("lmcache_nvme_backend: a listener of LMCache failed")


def _check_lmcache() -> None:
    """Refuse releases that publish a buffer whose load has failed before they delete it: another request may read it in
    between, and it may be stored here as the object's bytes. Seen in 0.5.4 and 0.5.5; 0.5.6 has a call that does
    neither, by which it is known here."""
    if not hasattr(L1Manager, "finish_write_and_delete"):
        raise ConfigError(
            "lmcache", f"{lmcache_version()}, which shows others what a failed load left in its memory", "0.5.6",
            "Upgrade LMCache, or use LMCacheConnectorV1 with NvmeBackend.",
        )  # fmt: skip


class _Countdown:
    """Calls `at_zero` when `one` has been called `count` times."""

    def __init__(self, count: int, at_zero: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._left, self._at_zero = count, at_zero

    def one(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._at_zero()


def _bitmap(bits: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(len(bits))
    for i, bit in enumerate(bits):
        if bit:
            bitmap.set(i)
    return bitmap
