"""A program that works on a root beside its stores: it removes chunks, and keeps the account right doing so."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.store import osio, recovery, session
from lmcache_nvme_backend.store.account import Account, Ledger, LockTimeout
from lmcache_nvme_backend.store.layout import Layout
from lmcache_nvme_backend.store.removal import Removal, remove_empty_namespace, remove_file, remove_hints
from lmcache_nvme_backend.store.settings import EVICT_BATCH

# Engines hold the lock for tens of microseconds, or for seconds while one counts a large root.
LOCK_WAIT_S: Final = 30.0


class Removed(msgspec.Struct):
    """What became of files that were to go."""

    chunks: int = 0
    nbytes: int = 0
    spared: int = 0  # they changed or were used since they were chosen
    gone: int = 0  # an engine was faster
    failed: int = 0

    def add(self, other: Removed) -> None:
        self.chunks += other.chunks
        self.nbytes += other.nbytes
        self.spared += other.spared
        self.gone += other.gone
        self.failed += other.failed


class Guest:
    """A context. While it lasts there is a session of its own: engines know that somebody removes files beside them,
    so their lookups promise nothing that is gone, and a guest that is killed leaves nothing but a session to sweep.

    Where no store is open, the root is counted first: files may have come and gone since the last one left.

    Raises `ConfigError` where the root's lock cannot be had, or nothing can be written there.
    """

    def __init__(self, layout: Layout, lock_wait_s: float = LOCK_WAIT_S) -> None:
        self._layout = layout
        self._lock_wait_s = lock_wait_s
        self._account = Account(layout.account, self._recount)
        self._session = session.Session(layout, bytes(16))

    def __enter__(self) -> Guest:
        try:
            for path in (self._layout.base, self._layout.sessions, self._layout.temp):
                osio.make_dir(path)
            peers = session.live_peers(self._layout)
            # Under the namespace of a store that is there anyway: one more would take its share of the quota.
            if peers:
                self._session = session.Session(self._layout, bytes.fromhex(peers[0].namespace))
            with self._account.locked(self._lock_wait_s) as ledger:
                self._session.ensure()
                session.sweep(self._layout, ledger)
                if all(peer.session_id == self._session.id for peer in session.live_peers(self._layout)):
                    found = self._recount()
                    ledger.used, ledger.reserved = found.used, found.reserved
        except OSError as error:
            refusal = self._refusal(error)
            osio.unlink_quietly(self._session.path)
            self._close()
            raise refusal from None
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with self._account.locked(self._lock_wait_s):
                osio.unlink(self._session.path)
        except OSError:
            pass  # an unlocked session file is swept by the next store that looks
        self._close()

    def _close(self) -> None:
        self._session.close()
        self._account.close()

    def _recount(self) -> Ledger:
        """Count everything under the root; called with the lock held."""
        for path in (self._layout.base, self._layout.sessions, self._layout.temp):
            osio.make_dir(path)
        session.sweep(self._layout, Ledger(0, 0))
        used = recovery.count_store(self._layout) + recovery.count_foreign(self._layout)
        return Ledger(used, sum(peer.reserved for peer in session.live_peers(self._layout)))

    def _refusal(self, error: OSError) -> ConfigError:
        if isinstance(error, LockTimeout):
            holder = self._account.holder()
            return ConfigError(
                "ROOT",
                f"the lock of {self._layout.root} held for longer than {self._lock_wait_s:g} s"
                + (f" by process {holder}" if holder is not None else ""),
                "a root whose lock is free now and then",
                "End that process, or try again once it has counted its files. What was removed so far is accounted.",
            )
        return ConfigError(
            "ROOT", f"{self._layout.root}, where nothing can be changed: {error.strerror or error}",
            "a store that this user can write", "Run it as the engine's user, and check the mount.",
        )  # fmt: skip

    def remove(
        self,
        files: Sequence[tuple[str, int]],
        may_go: Callable[[str, os.stat_result], bool],
        condition: Callable[[], bool] = lambda: True,
    ) -> Removed:
        """Remove files, given as (path, bytes in the account), where `may_go` still says so of what lies there now.

        In batches, each inside the root's lock and no longer than an eviction holds it; `condition` is asked at the
        head of each, and where it says no the rest is spared.
        """
        done = Removed()
        with Removal() as removal:
            for at in range(0, len(files), EVICT_BATCH):
                batch = files[at : at + EVICT_BATCH]
                try:
                    with self._account.locked(self._lock_wait_s) as ledger:
                        if not condition():
                            done.spared += len(files) - at
                            return done
                        for path, nbytes in batch:
                            self._remove(path, nbytes, may_go, ledger, removal, done)
                except OSError as error:
                    raise self._refusal(error) from None
                removal.finish()
        return done

    def remove_own(self, path: str) -> bool:
        """Remove a file that the store keeps about itself and that counts in its account."""
        try:
            with self._account.locked(self._lock_wait_s) as ledger:
                nbytes = recovery.count_own(path)
                removed = remove_file(path)
                if removed:
                    ledger.free(nbytes)
                return bool(removed)
        except OSError as error:
            raise self._refusal(error) from None

    @staticmethod
    def _remove(
        path: str,
        nbytes: int,
        may_go: Callable[[str, os.stat_result], bool],
        ledger: Ledger,
        removal: Removal,
        done: Removed,
    ) -> None:
        try:
            found = osio.lstat(path)
            if not _is_inside(path) or not may_go(path, found):
                done.spared += 1
                return
        except (FileNotFoundError, NotADirectoryError):
            done.gone += 1
            return
        except OSError:
            done.failed += 1
            return
        removed = removal.remove(path)
        if removed:
            ledger.free(nbytes)
            done.chunks += 1
            done.nbytes += nbytes
        elif removed is None:
            done.gone += 1
        else:
            done.failed += 1

    def is_open(self, digest: str) -> bool:
        """Whether a store has this namespace open now; this session does not count."""
        return any(
            peer.namespace == digest and peer.session_id != self._session.id
            for peer in session.live_peers(self._layout)
        )

    def remove_if_empty(self, digest: str) -> bool:
        """Take a namespace's directories away, if it has no chunk left and nobody has it open."""
        try:
            with self._account.locked(self._lock_wait_s) as ledger:
                directory = self._layout.namespace(digest)
                if self.is_open(digest) or any(recovery.namespace_chunks(directory)):
                    return False
                ledger.free(remove_hints(directory))
                return remove_empty_namespace(directory)
        except OSError:
            return False


def _is_inside(path: str) -> bool:
    """Whether neither the chunk's shard nor its namespace has become a symlink to somewhere else."""
    shard = path.rpartition("/")[0]
    return all(stat.S_ISDIR(osio.lstat(directory).st_mode) for directory in (shard, shard.rpartition("/")[0]))
