"""Moving a chunk between memory and disk, past the page cache where the file system allows it."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Final

from lmcache_nvme_backend.store import osio
from lmcache_nvme_backend.store.format import BLOCK

# A buffer that is not aligned goes through this much aligned memory, piece by piece.
BOUNCE_BYTES: Final = 1 << 20


class Pages:
    """Aligned memory for one transfer: a block for the header and one for the payload's last, padded block."""

    def __init__(self) -> None:
        self._memory = memoryview(mmap.mmap(-1, 2 * BLOCK))
        self.header = self._memory[:BLOCK]
        self.tail = self._memory[BLOCK:]


class Pool:
    """Recycles `Pages` and bounce buffers. As many live as transfers are in flight; list operations are atomic."""

    def __init__(self) -> None:
        self._pages: list[Pages] = []
        self._bounces: list[memoryview] = []

    def take_pages(self) -> Pages:
        try:
            return self._pages.pop()
        except IndexError:
            return Pages()

    def give_pages(self, pages: Pages) -> None:
        self._pages.append(pages)

    def take_bounce(self) -> memoryview:
        try:
            return self._bounces.pop()
        except IndexError:
            return memoryview(mmap.mmap(-1, BOUNCE_BYTES))

    def give_bounce(self, bounce: memoryview) -> None:
        self._bounces.append(bounce)


def is_aligned(view: memoryview) -> bool:
    """Whether O_DIRECT can use this memory. A read-only view counts as unaligned: its address cannot be had cheaply."""
    if view.readonly:
        return False
    if not len(view):
        return True
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % BLOCK == 0


def as_bytes(view: memoryview) -> memoryview:
    """The same memory as a flat view of bytes. Raises `TypeError` where it is not contiguous."""
    return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")


class Transfer:
    """Reads and writes whole chunk files; knows whether this file system takes O_DIRECT."""

    def __init__(self, direct: bool, pool: Pool) -> None:
        self.direct = direct
        self.pool = pool
        self.flags = osio.O_DIRECT if direct else 0

    def write(self, fd: int, pages: Pages, payload: memoryview) -> None:
        """Write `pages.header`, the payload and zero padding to the start of the file. Uses `pages.tail`."""
        floor = _floor(len(payload))
        rest = len(payload) - floor
        if rest:
            pages.tail[:rest] = payload[floor:]
            pages.tail[rest:] = bytes(BLOCK - rest)
        tail = [pages.tail] if rest else []
        body = payload[:floor]
        if not self.direct or is_aligned(body):
            osio.write_fully(fd, [pages.header, body, *tail])
            return
        osio.write_fully(fd, [pages.header])
        bounce = self.pool.take_bounce()
        try:
            for at in range(0, floor, BOUNCE_BYTES):
                piece = body[at : at + BOUNCE_BYTES]
                bounce[: len(piece)] = piece
                osio.write_fully(fd, [bounce[: len(piece)]], BLOCK + at)
        finally:
            self.pool.give_bounce(bounce)
        osio.write_fully(fd, tail, BLOCK + floor)

    def read(self, fd: int, pages: Pages, into: memoryview, blocks: int) -> bool:
        """Read a file of `blocks` blocks: the header to `pages.header`, the last block to `pages.tail`, what lies
        between to the start of `into` (which has room for it). False where the file ends early.
        """
        if blocks == 1:
            return osio.read_fully(fd, [pages.header]) == BLOCK
        floor = (blocks - 2) * BLOCK
        body = into[:floor]
        if not self.direct or is_aligned(body):
            return osio.read_fully(fd, [pages.header, body, pages.tail]) == blocks * BLOCK
        if osio.read_fully(fd, [pages.header]) != BLOCK:
            return False
        bounce = self.pool.take_bounce()
        try:
            for at in range(0, floor, BOUNCE_BYTES):
                size = min(BOUNCE_BYTES, floor - at)
                if osio.read_fully(fd, [bounce[:size]], BLOCK + at) != size:
                    return False
                body[at : at + size] = bounce[:size]
        finally:
            self.pool.give_bounce(bounce)
        return osio.read_fully(fd, [pages.tail], BLOCK + floor) == BLOCK

    def finish(self, fd: int) -> None:
        """Keep buffered I/O out of the page cache: on a unified-memory box it is the model's memory.

        Dirty pages are only started on their way to the disk by this; they are dropped as soon as they are clean.
        """
        if not self.direct:
            try:
                osio.fadvise_dontneed(fd)
            except OSError:
                pass


def _floor(nbytes: int) -> int:
    return nbytes - nbytes % BLOCK


def probe(path: str) -> str | None:
    """Try a direct write and read on a new file at `path`. None where both work, else what failed.

    Raises `OSError` where the disk is full, which tells nothing.

    Some file systems accept the open and refuse the write, others accept what a disk refuses: only doing it tells.
    """
    pages = Pages()
    pages.header[:] = bytes(range(256)) * (BLOCK // 256)
    try:
        fd = osio.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | osio.O_DIRECT)
    except OSError as error:
        osio.unlink_quietly(path)
        if error.errno in osio.FULL:
            raise
        return f"open: {error.strerror}"
    try:
        osio.write_fully(fd, [pages.header])
        if osio.read_fully(fd, [pages.tail]) != BLOCK or pages.tail != pages.header:
            return "read: other bytes than were written"
    except OSError as error:
        if error.errno in osio.FULL:
            raise
        return f"write or read: {error.strerror}"
    finally:
        osio.close_quietly(fd)
        osio.unlink_quietly(path)
    return None


def file_system_type(path: str) -> str:
    """The type of the file system that holds `path`, as the kernel calls it; "" where it cannot be told."""
    try:
        device = osio.lstat(path).st_dev
        for line in Path("/proc/self/mountinfo").read_text("utf-8", errors="replace").splitlines():
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == f"{os.major(device)}:{os.minor(device)}":
                return rest.split()[0]
    except (OSError, IndexError):
        pass
    return ""
