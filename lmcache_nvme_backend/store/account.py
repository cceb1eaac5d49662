"""The account of a root: how many bytes lie there, shared by every process that stores under it.

One small file holds the figures and is the lock that guards them (flock: it ends with its process, however that
ends). Whoever changes the directory does so inside the lock, with a dirty mark set before and cleared after, so the
figures are exact whenever the lock is free; who finds the mark set, or no plausible figures, counts the directory
again. The file is read and written, not mapped: a mapping would turn somebody's truncation of it into a SIGBUS.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
import xxhash

from lmcache_nvme_backend.store import forks, osio

_MAGIC: Final = b"KVACCT\x01\n"
_RECORD = struct.Struct("<8sQQQQ")  # magic, dirty, used, reserved, pid of the last holder
_CHECK = struct.Struct("<Q")
_SIZE = _RECORD.size + _CHECK.size
# Polling a lock that is held for tens of microseconds: start there, and do not burn a core on a long recount.
_POLL_MIN_S: Final = 20e-6
_POLL_MAX_S: Final = 5e-3


class LockTimeout(OSError):
    """The root's lock was not free within the bound."""


class Ledger(msgspec.Struct):
    """The figures, while the lock is held. Change them right after the directory, call by call."""

    used: int
    reserved: int
    stale: bool = False  # set it where the directory has not been counted: the next holder counts

    def free(self, nbytes: int) -> None:
        self.used = max(0, self.used - nbytes)

    def cancel(self, nbytes: int) -> None:
        self.reserved = max(0, self.reserved - nbytes)


def look(path: str) -> tuple[Ledger, bool] | None:
    """The figures of an account as they are now, and whether somebody is changing them or died doing so. Takes no lock
    and changes nothing; None where there are no plausible figures."""
    try:
        fd = osio.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        data = osio.pread(fd, _SIZE, 0)
    except OSError:
        return None
    finally:
        osio.close_quietly(fd)
    ledger = Account._parse(data, even_if_dirty=True)
    return None if ledger is None else (ledger, Account._parse(data, even_if_dirty=False) is None)


class Account:
    """`recount` counts the directory; it is called with the lock held and must not take it."""

    def __init__(self, path: str, recount: Callable[[], Ledger]) -> None:
        self._path = path
        self._recount = recount
        self._mutex = threading.Lock()
        self._fd = -1
        self._inode = (0, 0)
        self._closed = False
        self._last: Ledger | None = None
        forks.register(self)

    @contextmanager
    def locked(self, wait_s: float, force_recount: bool = False) -> Iterator[Ledger]:
        """Hold the lock; the ledger's figures are written back at the end, also after an error in the body.

        Raises `LockTimeout` after `wait_s`, and `OSError` where the account itself cannot be read or written.
        """
        deadline = time.monotonic() + wait_s
        if not self._mutex.acquire(timeout=max(0.0, wait_s)):
            raise LockTimeout(f"another thread holds the lock of {self._path}")
        try:
            self._lock_file(deadline)
            try:
                ledger = None if force_recount else self._read()
                if ledger is None:
                    self._write(self._last or Ledger(0, 0), dirty=True)
                    ledger = self._recount()
                self._write(ledger, dirty=True)
                try:
                    yield ledger
                finally:
                    try:
                        self._write(ledger, dirty=ledger.stale)
                    except OSError:
                        pass  # the mark stays set: the next holder counts again
            finally:
                self._unlock_file()
        finally:
            self._mutex.release()

    def peek(self) -> Ledger | None:
        """The figures without the lock, as they were a moment ago; None where none have been read yet."""
        try:
            found = self._parse(osio.pread(self._fd, _SIZE, 0), even_if_dirty=True)
        except OSError:
            found = None
        return found or self._last

    def holder(self) -> int | None:
        """The process that took the lock last, if it still lives."""
        try:
            data = osio.pread(self._fd, _SIZE, 0)
            pid = int(_RECORD.unpack_from(data)[4])
            os.kill(pid, 0)
        except (OSError, struct.error, OverflowError):
            return None
        return pid

    def close(self) -> None:
        with self._mutex:
            self._closed = True
            if self._fd >= 0:
                osio.close_quietly(self._fd)
                self._fd = -1

    def leave_to_parent(self) -> None:
        """See `forks`: the child opens the file anew, should it need it."""
        self._mutex = threading.Lock()  # a thread that held it is not in the child
        fd, self._fd = self._fd, -1
        if fd >= 0:
            osio.close_quietly(fd)

    def _lock_file(self, deadline: float) -> None:
        pause = _POLL_MIN_S
        while True:
            if self._fd < 0:
                self._open()
            try:
                osio.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() + pause > deadline:
                    raise LockTimeout(f"another process holds the lock of {self._path}") from None
                time.sleep(pause)
                pause = min(pause * 2, _POLL_MAX_S)
                continue
            try:
                current = self._is_current()
            except OSError:
                self._unlock_file()
                raise
            if current:
                return
            # Somebody deleted the file: processes that start now lock another one. Join them.
            osio.close_quietly(self._fd)
            self._fd = -1

    def _unlock_file(self) -> None:
        try:
            osio.flock(self._fd, fcntl.LOCK_UN)
        except OSError:
            osio.close_quietly(self._fd)  # this drops the lock as well
            self._fd = -1

    def _open(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, "the account is closed")
        try:
            self._fd = osio.open(self._path, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:  # somebody deleted the directory; the recount that follows restores the rest
            osio.make_dir(self._path.rpartition("/")[0])
            self._fd = osio.open(self._path, os.O_RDWR | os.O_CREAT)
        found = osio.fstat(self._fd)
        self._inode = (found.st_dev, found.st_ino)
        osio.fchmod(self._fd, 0o600)

    def _is_current(self) -> bool:
        try:
            if stat.S_ISLNK(osio.lstat(self._path.rpartition("/")[0]).st_mode):
                raise OSError(errno.ELOOP, "a link has taken the place of the store's directory")
            found = osio.lstat(self._path)
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == self._inode

    def _read(self) -> Ledger | None:
        return self._parse(osio.pread(self._fd, _SIZE, 0), even_if_dirty=False)

    @staticmethod
    def _parse(data: bytes, even_if_dirty: bool) -> Ledger | None:
        if len(data) != _SIZE:
            return None
        magic, dirty, used, reserved, _ = _RECORD.unpack_from(data)
        if magic != _MAGIC or (dirty and not even_if_dirty):
            return None
        if _CHECK.unpack_from(data, _RECORD.size)[0] != xxhash.xxh3_64_intdigest(data[: _RECORD.size]):
            return None
        return Ledger(used, reserved)

    def _write(self, ledger: Ledger, dirty: bool) -> None:
        self._last = ledger
        record = _RECORD.pack(_MAGIC, dirty, ledger.used, ledger.reserved, os.getpid())
        osio.pwrite(self._fd, record + _CHECK.pack(xxhash.xxh3_64_intdigest(record)), 0)
