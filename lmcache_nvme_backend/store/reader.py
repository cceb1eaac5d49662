"""Reading one chunk file, trusting nothing in it."""

from __future__ import annotations

import errno
import mmap
import os
import stat

from lmcache_nvme_backend.store import codec, osio, recovery
from lmcache_nvme_backend.store.breaker import Breaker
from lmcache_nvme_backend.store.direct_io import Pages, Transfer
from lmcache_nvme_backend.store.format import BLOCK, CODEC_NONE, Header, checksum, parse_header
from lmcache_nvme_backend.store.index import Entry
from lmcache_nvme_backend.store.keys import ChunkKey
from lmcache_nvme_backend.store.layout import Layout
from lmcache_nvme_backend.store.namespace import NamespaceDigest
from lmcache_nvme_backend.store.results import GetResult, Hit, Miss, MissCause

# A disk's or file system's word on the bytes of one file: asking again would get the same answer.
_UNREADABLE = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)


class ReadOutcome:
    """A result, the bytes that crossed the disk, and the inode that was read (so that a bad file, and no newer one,
    can be removed)."""

    __slots__ = ("inode", "nbytes", "result")

    def __init__(self, result: GetResult, nbytes: int = 0, inode: int | None = None) -> None:
        self.result, self.nbytes, self.inode = result, nbytes, inode


class Reader:
    """Thread-safe: every call has its own descriptor and its own pages."""

    def __init__(
        self, layout: Layout, namespace: NamespaceDigest, transfer: Transfer, breaker: Breaker | None = None
    ) -> None:
        self._layout = layout
        self._namespace = namespace
        self._transfer = transfer
        self._breaker = breaker

    def read(self, key: ChunkKey, entry: Entry, into: memoryview) -> ReadOutcome:
        """Fill `into` with the chunk. On a miss the content of `into` is undefined, never to be used."""
        path = self._layout.chunk(self._namespace.digest, key, entry.depth, entry.blocks)
        try:
            if recovery.leads_outside(path):
                return ReadOutcome(Miss(MissCause.ABSENT))
            fd = osio.open(path, os.O_RDONLY | self._transfer.flags)
        except (FileNotFoundError, NotADirectoryError):
            return ReadOutcome(Miss(MissCause.ABSENT))
        except OSError as error:
            return self._not_opened(path, error)
        pages = self._transfer.pool.take_pages()
        try:
            found = osio.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != entry.nbytes:
                return ReadOutcome(Miss(MissCause.TRUNCATED), inode=found.st_ino)
            try:
                result, nbytes = self._fill(fd, pages, key, entry, into)
            except OSError as error:
                if error.errno not in _UNREADABLE:
                    raise
                self._failed(error)
                return ReadOutcome(Miss(MissCause.UNREADABLE), inode=found.st_ino)
            self._transfer.finish(fd)
            if self._breaker is not None:
                self._breaker.worked("read")
            return ReadOutcome(result, nbytes, found.st_ino)
        except OSError as error:
            return self._failed(error)
        finally:
            self._transfer.pool.give_pages(pages)
            osio.close_quietly(fd)

    def _failed(self, error: OSError) -> ReadOutcome:
        if self._breaker is not None:
            self._breaker.failed("read", error)
        return ReadOutcome(Miss(MissCause.IO_ERROR))

    def _not_opened(self, path: str, error: OSError) -> ReadOutcome:
        """A symlink or a device in a chunk's place is a bad chunk; any other failure says nothing about the file."""
        try:
            found = osio.lstat(path)
        except FileNotFoundError:
            return ReadOutcome(Miss(MissCause.ABSENT))
        except OSError:
            return self._failed(error)
        if stat.S_ISREG(found.st_mode):
            return self._failed(error)
        return ReadOutcome(Miss(MissCause.TRUNCATED), inode=found.st_ino)

    def _fill(self, fd: int, pages: Pages, key: ChunkKey, entry: Entry, into: memoryview) -> tuple[GetResult, int]:
        floor = max(0, entry.blocks - 2) * BLOCK
        scratch = None
        if floor <= len(into):
            target = into
        else:
            # A compressed chunk is smaller than its buffer, so this one is too large, unless the header is bad.
            if osio.read_fully(fd, [pages.header]) != BLOCK:
                return Miss(MissCause.TRUNCATED), 0
            header = self._header(pages, key, entry)
            return Miss(header if isinstance(header, MissCause) else MissCause.TOO_LARGE), 0
        if not self._transfer.read(fd, pages, target, entry.blocks):
            return Miss(MissCause.TRUNCATED), 0
        header = self._header(pages, key, entry)
        if isinstance(header, MissCause):
            return Miss(header), 0
        if header.raw_bytes > len(into):
            return Miss(MissCause.TOO_LARGE), 0
        stored = header.payload_bytes
        if header.codec != CODEC_NONE:
            # The part that was read into the buffer moves aside, since it decompresses into the same buffer.
            scratch = memoryview(mmap.mmap(-1, max(stored, 1)))
            scratch[:floor] = into[:floor]
            scratch[floor:stored] = pages.tail[: stored - floor]
            if checksum(scratch[:stored]) != header.payload_checksum:
                return Miss(MissCause.PAYLOAD_CHECKSUM), stored
            if not codec.decompress(header.codec, scratch[:stored], into[: header.raw_bytes]):
                return Miss(MissCause.CODEC), stored
        else:
            into[floor:stored] = pages.tail[: stored - floor]
            if checksum(into[:stored]) != header.payload_checksum:
                return Miss(MissCause.PAYLOAD_CHECKSUM), stored
        return Hit(header.raw_bytes, header.tokens), stored

    def _header(self, pages: Pages, key: ChunkKey, entry: Entry) -> Header | MissCause:
        return parse_header(pages.header, key, self._namespace.raw_digest, entry.depth, entry.blocks)
