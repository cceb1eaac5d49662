"""Writing one chunk: reserve room, write under a temporary name, publish under the final one."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections import deque
from collections.abc import Container, Iterable

from lmcache_nvme_backend.store import codec, osio, recovery
from lmcache_nvme_backend.store.account import Account, Ledger, LockTimeout
from lmcache_nvme_backend.store.breaker import Breaker
from lmcache_nvme_backend.store.direct_io import Transfer
from lmcache_nvme_backend.store.evictor import Evictor
from lmcache_nvme_backend.store.format import BLOCK, CODEC_NONE, MAX_UINT32, Header, blocks_of, checksum
from lmcache_nvme_backend.store.index import Index
from lmcache_nvme_backend.store.keys import ChunkKey
from lmcache_nvme_backend.store.layout import Layout
from lmcache_nvme_backend.store.namespace import Namespace
from lmcache_nvme_backend.store.removal import remove_file
from lmcache_nvme_backend.store.results import PutResult
from lmcache_nvme_backend.store.session import Session
from lmcache_nvme_backend.store.settings import STORE_LOCK_WAIT_S, WRITE_BACK_S, StoreSettings
from lmcache_nvme_backend.store.write_budget import WriteBudget


class Writer:
    """Thread-safe. Room is reserved in the account before the first byte is written, so the disk's use never passes
    the quota, and the reservation and the temporary are given back on every path."""

    def __init__(
        self,
        layout: Layout,
        namespace: Namespace,
        settings: StoreSettings,
        account: Account,
        session: Session,
        index: Index,
        evictor: Evictor,
        transfer: Transfer,
        breaker: Breaker,
        budget: WriteBudget,
    ) -> None:
        self._layout = layout
        self._namespace = namespace
        self._settings = settings
        self._account = account
        self._session = session
        self._index = index
        self._evictor = evictor
        self._transfer = transfer
        self._breaker = breaker
        self._budget = budget
        self._written: deque[tuple[float, str]] = deque(maxlen=4096)  # buffered writes still in the page cache
        self._abandoned: deque[tuple[str, int]] = deque()  # temporaries of failed writes, and the room they hold
        self._bad: deque[tuple[str, int, int]] = deque()  # bad chunks that are still there: path, size, inode

    def write(
        self, key: ChunkKey, raw: memoryview, depth: int, parent: ChunkKey | None, tokens: int
    ) -> tuple[PutResult, int]:
        """(outcome, payload bytes written)."""
        kind, payload = CODEC_NONE, raw
        if self._settings.codec != "none":
            kind, payload = codec.compress(raw, split=self._settings.codec == "zstd-split")
        blocks = blocks_of(len(payload))
        nbytes = blocks * BLOCK
        if blocks > MAX_UINT32 or nbytes > self._settings.quota_bytes:
            return PutResult.QUOTA, 0
        header = Header(
            key, self._namespace.raw_digest, depth, tokens, kind,
            len(payload), len(raw), checksum(payload),
        )  # fmt: skip
        spare = frozenset(self._index.ancestors(parent))
        try:
            if not self._spend(nbytes, spare):
                return PutResult.WRITE_BUDGET, 0
            temporary = self._reserve(nbytes, spare)
        except LockTimeout:
            return PutResult.LOCK_WAIT, 0
        except OSError as error:
            return self._failed(error), 0
        if temporary is None:
            return PutResult.QUOTA, 0
        published = False
        try:
            try:
                self._write_file(temporary, header, payload)
            except OSError as error:
                if error.errno not in osio.FULL:
                    raise
                osio.unlink_quietly(temporary)
                if not self._evictor.free(2 * nbytes, spare):
                    return PutResult.NO_SPACE, 0
                self._write_file(temporary, header, payload)
            outcome = self._publish(temporary, key, depth, blocks, parent)
            published = outcome is PutResult.STORED
            self._breaker.worked("write")
            return outcome, len(payload) if outcome is PutResult.STORED else 0
        except LockTimeout:
            return PutResult.LOCK_WAIT, 0
        except OSError as error:
            return self._failed(error), 0
        finally:
            if not published:
                self.abandon(temporary, nbytes)

    def _failed(self, error: OSError) -> PutResult:
        if error.errno in osio.FULL:
            return PutResult.NO_SPACE
        self._breaker.failed("write", error)
        return PutResult.IO_ERROR

    def _spend(self, nbytes: int, spare: Container[ChunkKey]) -> bool:
        """Take a chunk that is about to be written out of the budget. What then fails has been written in part."""
        if not self._budget.limited:
            return True
        try:
            with self._account.locked(STORE_LOCK_WAIT_S):
                return self._budget.take(nbytes)
        except OSError as error:
            if error.errno not in osio.FULL or not self._evictor.free(BLOCK, spare):
                raise
        with self._account.locked(STORE_LOCK_WAIT_S):
            return self._budget.take(nbytes)

    def _reserve(self, nbytes: int, spare: Container[ChunkKey]) -> str | None:
        """A temporary's path, with room for it reserved; None where the quota has none."""
        for _ in range(8):
            with self._account.locked(STORE_LOCK_WAIT_S) as ledger:
                if ledger.used + ledger.reserved + nbytes <= self._settings.quota_bytes:
                    self._change_reservation(ledger, nbytes)
                    return self._session.temporary()
            if not self._evictor.make_room(nbytes, spare):
                return None
        return None  # other writers took the room each time

    def _write_file(self, path: str, header: Header, payload: memoryview) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._transfer.flags
        try:
            if recovery.leads_outside(path):
                raise NotADirectoryError
            fd = osio.open(path, flags)
        except (FileNotFoundError, NotADirectoryError):
            osio.make_dir_in_place_of_file(self._layout.temp)
            fd = osio.open(path, flags)
        pages = self._transfer.pool.take_pages()
        try:
            osio.fchmod(fd, 0o600)
            header.pack_into(pages.header)
            self._transfer.write(fd, pages, payload)
            if self._settings.fsync == "data":
                osio.fdatasync(fd)
            self._transfer.finish(fd)
        except OSError:
            osio.close_quietly(fd)
            raise
        else:
            osio.close(fd)
        finally:
            self._transfer.pool.give_pages(pages)

    def _publish(self, temporary: str, key: ChunkKey, depth: int, blocks: int, parent: ChunkKey | None) -> PutResult:
        """Give the chunk its name, unless another process has stored it meanwhile."""
        nbytes = blocks * BLOCK
        path = self._layout.chunk(self._namespace.digest, key, depth, blocks)
        with self._account.locked(STORE_LOCK_WAIT_S) as ledger:
            if self._is_there(path, nbytes):
                self._index.add(key, depth, blocks, parent)
                return PutResult.EXISTS
            self._rename(temporary, path, key)
            ledger.used += nbytes
            self._index.add(key, depth, blocks, parent)
            self._change_reservation(ledger, -nbytes)
        if not self._transfer.direct:
            self._written.append((time.monotonic(), path))
        return PutResult.STORED

    def _is_there(self, path: str, nbytes: int) -> bool:
        try:
            if recovery.leads_outside(path):
                return False
            found = osio.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        if stat.S_ISREG(found.st_mode) and found.st_size == nbytes:
            return True
        remove_file(path)
        return False

    def _rename(self, temporary: str, path: str, key: ChunkKey) -> None:
        try:
            if recovery.leads_outside(path):
                raise NotADirectoryError
            osio.rename(temporary, path)
        except (FileNotFoundError, NotADirectoryError):
            osio.lstat(temporary)  # gone itself, if somebody emptied the root: then this raises
            for directory in (
                self._layout.namespace(self._namespace.digest),
                self._layout.shard(self._namespace.digest, key),
            ):
                osio.make_dir_in_place_of_file(directory)
            osio.rename(temporary, path)

    def replace(self, path: str, pieces: Iterable[bytes], nbytes: int) -> bool:
        """Give a file of the store's own, of `nbytes` in all, a new content within quota and write budget; False where
        there is no room for it. Raises `OSError`."""
        if recovery.leads_outside(path) or not self._spend(nbytes, ()):
            return False
        temporary = self._reserve(nbytes, ())
        if temporary is None:
            return False
        published = False
        try:
            if recovery.leads_outside(temporary):
                return False
            fd = osio.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                osio.fchmod(fd, 0o600)
                at = 0
                for piece in pieces:
                    osio.write_fully(fd, [memoryview(piece)], at)
                    at += len(piece)
            finally:
                osio.close_quietly(fd)
            # Explicit, since the kernel's own clock for files runs up to a tick behind.
            osio.utime(temporary, time.time_ns())
            with self._account.locked(STORE_LOCK_WAIT_S) as ledger:
                if recovery.leads_outside(path):
                    return False
                before = recovery.count_own(path)
                osio.rename(temporary, path)
                published = True
                ledger.used = max(0, ledger.used + nbytes - before)
                self._change_reservation(ledger, -nbytes)
        finally:
            if not published:
                self.abandon(temporary, nbytes)
        return True

    def remove(self, path: str) -> None:
        """Take such a file away. Raises `OSError`."""
        if not (nbytes := recovery.count_own(path)):
            return
        with self._account.locked(STORE_LOCK_WAIT_S) as ledger:
            if remove_file(path):
                ledger.free(nbytes)

    def drop_written_pages(self) -> None:
        """Take buffered writes that have reached the disk by now out of the page cache."""
        while self._written and time.monotonic() - self._written[0][0] > WRITE_BACK_S:
            _, path = self._written.popleft()
            try:
                fd = osio.open(path, os.O_RDONLY)
            except OSError:
                continue
            self._transfer.finish(fd)
            osio.close_quietly(fd)

    def _change_reservation(self, ledger: Ledger, nbytes: int) -> None:
        """Inside the lock: the ledger's sum and the session's own part move together."""
        ledger.reserved = max(0, ledger.reserved + nbytes)
        self._session.reserved = max(0, self._session.reserved + nbytes)
        try:
            self._session.publish(self._index.nbytes)
        except OSError:
            pass  # the record only matters to a recount, and the next change writes it again

    def abandon(self, temporary: str, nbytes: int) -> None:
        """A temporary is of no use any more; `nbytes` are reserved for it."""
        self._abandoned.append((temporary, nbytes))
        self.settle()

    def remove_later(self, path: str, nbytes: int, inode: int) -> None:
        """A bad chunk could not be removed; nobody knows of it any more, so this is the only way to its room."""
        self._bad.append((path, nbytes, inode))

    def settle(self) -> None:
        """Remove what failed writes and failed removals have left and give back its room. What cannot be done now,
        since the lock is not to be had or the file not to be removed, keeps its room and is tried again by the next
        call."""
        self._settle_bad()
        while self._abandoned:
            try:
                temporary, nbytes = self._abandoned.popleft()
            except IndexError:
                return
            try:
                if remove_file(temporary) is False:
                    raise OSError(errno.EIO, "a temporary cannot be removed")
                if not nbytes:
                    continue
                with self._account.locked(STORE_LOCK_WAIT_S) as ledger:
                    self._change_reservation(ledger, -nbytes)
            except OSError:
                self._abandoned.append((temporary, nbytes))
                return

    def _settle_bad(self) -> None:
        for _ in range(len(self._bad)):
            try:
                path, nbytes, inode = bad = self._bad.popleft()
            except IndexError:
                return
            try:
                with self._account.locked(STORE_LOCK_WAIT_S) as ledger:
                    found = osio.lstat(path)
                    if found.st_ino != inode or not stat.S_ISREG(found.st_mode):
                        continue  # a good one has taken its place, or it is somebody's directory
                    removed = remove_file(path)
                    if removed:
                        ledger.free(nbytes)
            except FileNotFoundError:
                continue
            except OSError:
                removed = False
            if removed is False:
                self._bad.append(bad)
