"""Sessions: who has the root open, with which namespace, and how much room its unfinished writes may take.

A session is a small file that its store keeps locked (flock) for life. A session file that nobody locks belongs to a
dead process: its reservation is void and its temporaries can go.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import struct
import time
from typing import Final

import msgspec

from lmcache_nvme_backend.store import forks, osio, recovery
from lmcache_nvme_backend.store.account import Ledger
from lmcache_nvme_backend.store.layout import Layout

_MAGIC: Final = b"KVSESS\x01\n"
_RECORD = struct.Struct("<8s16sQQQ")  # magic, namespace, pid, bytes reserved, bytes held by the namespace
_QUOTA = struct.Struct("<Q")  # follows the record, for people; 0 where the session has none
_ID = re.compile(r"[0-9a-f]{16}")
_TEMPORARY = re.compile(r"([0-9a-f]{16})-\d+")


class Peer(msgspec.Struct, frozen=True):
    """A live session, as its file tells."""

    session_id: str
    namespace: str  # hex digest
    pid: int
    reserved: int
    namespace_bytes: int
    quota_bytes: int | None = None


class Session:
    """This store's own session. All changes of `reserved` happen inside the account's lock."""

    def __init__(self, layout: Layout, namespace: bytes, quota_bytes: int = 0) -> None:
        self._layout = layout
        self._namespace = namespace
        self._quota = _QUOTA.pack(quota_bytes)
        self._fd = -1
        self._counter = 0
        self.id = secrets.token_hex(8)
        self.reserved = 0
        forks.register(self)

    @property
    def path(self) -> str:
        return f"{self._layout.sessions}/{self.id}"

    def ensure(self) -> None:
        """Create the file and lock it, or do nothing if it is there. Call it inside the account's lock, so that nobody
        finds the file before it is locked."""
        if self._fd >= 0:
            try:
                osio.lstat(self.path)
                return
            except FileNotFoundError:
                self.close()
        fd = osio.open(self.path, os.O_RDWR | os.O_CREAT)
        try:
            osio.fchmod(fd, 0o600)
            _lock_own(fd)
            self._fd = fd
            self.publish(0)
            self._announce()
        except OSError:
            self._fd = -1
            osio.close_quietly(fd)
            osio.unlink_quietly(self.path)
            raise

    def _announce(self) -> None:
        """Move the directory's time once more: who looked between the file's creation and its record, however long that
        took, saw a session that nobody locks, and looks again."""
        try:
            osio.utime(self._layout.sessions, time.time_ns())
        except OSError:
            pass

    def publish(self, namespace_bytes: int) -> None:
        """Write the record. An error leaves the old one, which a recount then counts."""
        record = _RECORD.pack(_MAGIC, self._namespace, os.getpid(), self.reserved, namespace_bytes)
        osio.pwrite(self._fd, record + self._quota, 0)

    @property
    def probe_path(self) -> str:
        """A temporary's path for one prober at a time, swept with the others."""
        return f"{self._layout.temp}/{self.id}-0"

    def temporary(self) -> str:
        """A path that nobody else uses. Call it inside the account's lock."""
        self._counter += 1
        return f"{self._layout.temp}/{self.id}-{self._counter}"

    def close(self) -> None:
        if self._fd >= 0:
            osio.close_quietly(self._fd)
            self._fd = -1

    def leave_to_parent(self) -> None:
        """See `forks`. A store used in the child stores nothing, and its close takes nothing of the parent's away."""
        self.close()
        self.id = secrets.token_hex(8)
        self.reserved = 0


def _lock_own(fd: int) -> None:
    """Lock a file that is new: only a passing look of another process can be in the way, for microseconds."""
    for _ in range(1000):
        try:
            osio.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(1e-4)
    osio.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _look(layout: Layout, session_id: str) -> tuple[bool, Peer | None]:
    """(whether its process lives, its record if that is readable)."""
    try:
        fd = osio.open(f"{layout.sessions}/{session_id}", os.O_RDONLY)
    except FileNotFoundError:
        return False, None
    try:
        try:
            osio.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            live = False
        except BlockingIOError:
            live = True
        data = osio.pread(fd, _RECORD.size + _QUOTA.size, 0)
    finally:
        osio.close_quietly(fd)
    if len(data) < _RECORD.size or data[: len(_MAGIC)] != _MAGIC:
        return live, None
    _, namespace, pid, reserved, namespace_bytes = _RECORD.unpack_from(data)
    quota = _QUOTA.unpack_from(data, _RECORD.size)[0] if len(data) == _RECORD.size + _QUOTA.size else 0
    return live, Peer(session_id, namespace.hex(), pid, reserved, namespace_bytes, quota or None)


def live_peers(layout: Layout) -> list[Peer]:
    """All live sessions, the caller's own included. Needs no lock."""
    return look_around(layout)[0]


def look_around(layout: Layout) -> tuple[list[Peer], bool]:
    """All live sessions, and whether there are others: of killed processes, of one that is just coming, or unreadable
    ones. Needs no lock."""
    peers, remains = [], False
    for name in osio.listdir(layout.sessions):
        if _ID.fullmatch(name):
            try:
                live, peer = _look(layout, name)
            except OSError:
                live, peer = False, None
            if live and peer is not None:
                peers.append(peer)
            else:
                remains = True
    return peers, remains


def sweep(layout: Layout, ledger: Ledger) -> int:
    """Remove dead sessions with their temporaries and take their reservations out of the ledger; returns how many
    there were. Call it inside the account's lock."""
    dead = set()
    live = set()
    for name in osio.listdir(layout.sessions):
        if not _ID.fullmatch(name):
            continue
        try:
            is_live, peer = _look(layout, name)
        except OSError:
            is_live, peer = True, None  # cannot be told: leave it alone
        if is_live:
            live.add(name)
        else:
            dead.add((name, peer.reserved if peer is not None else 0))
    for name in recovery.list_dir_or_raise(layout.temp):
        owner = _TEMPORARY.fullmatch(name)
        if owner is None or owner[1] not in live:
            osio.unlink_quietly(f"{layout.temp}/{name}")
    for name, reserved in sorted(dead):
        if osio.unlink_quietly(f"{layout.sessions}/{name}"):
            ledger.cancel(reserved)
    return len(dead)
