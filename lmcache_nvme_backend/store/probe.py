"""Trying a disk that has failed before: does it do now what a store and a load need?"""

from __future__ import annotations

import errno
import os
import random
from typing import Final

from lmcache_nvme_backend.store import osio
from lmcache_nvme_backend.store.account import Account
from lmcache_nvme_backend.store.direct_io import Transfer
from lmcache_nvme_backend.store.format import BLOCK
from lmcache_nvme_backend.store.index import Index
from lmcache_nvme_backend.store.layout import Layout
from lmcache_nvme_backend.store.session import Session
from lmcache_nvme_backend.store.settings import STORE_LOCK_WAIT_S

# Of so many chunks one must be readable: some may lie on the bad part of a disk for good.
_CHUNKS: Final = 4


class DiskProbe:
    """One block written, brought to the disk and read back, and the first block of a chunk read."""

    def __init__(
        self, layout: Layout, digest: str, account: Account, session: Session, index: Index, transfer: Transfer
    ) -> None:
        self._layout = layout
        self._digest = digest
        self._account = account
        self._session = session
        self._index = index
        self._transfer = transfer

    def __call__(self) -> None:
        """Raises `OSError` for the first thing that does not work."""
        with self._account.locked(STORE_LOCK_WAIT_S):
            pass
        osio.make_dir(self._layout.temp)
        self._write_and_read(self._session.probe_path)
        self._read_a_chunk()

    def _write_and_read(self, path: str) -> None:
        osio.unlink_quietly(path)  # a probe that could not remove its file
        pages = self._transfer.pool.take_pages()
        try:
            fd = osio.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | self._transfer.flags)
            try:
                pages.header[:] = os.urandom(BLOCK)
                osio.write_fully(fd, [pages.header])
                osio.fdatasync(fd)
                if osio.read_fully(fd, [pages.tail]) != BLOCK or pages.tail != pages.header:
                    raise OSError(errno.EIO, "other bytes came back than were written")
            finally:
                osio.close_quietly(fd)
        except OSError as error:
            if error.errno not in osio.FULL:  # a full disk works: eviction deals with it
                raise
        finally:
            osio.unlink_quietly(path)
            self._transfer.pool.give_pages(pages)

    def _read_a_chunk(self) -> None:
        keys = self._index.all_keys()
        failure: OSError | None = None
        for key in random.sample(keys, min(_CHUNKS, len(keys))):
            entry = self._index.get(key)
            if entry is None:
                continue
            try:
                self._read_block(self._layout.chunk(self._digest, key, entry.depth, entry.blocks))
                return
            except FileNotFoundError:
                continue
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure

    def _read_block(self, path: str) -> None:
        fd = osio.open(path, os.O_RDONLY | self._transfer.flags)
        pages = self._transfer.pool.take_pages()
        try:
            osio.fstat(fd)
            osio.read_fully(fd, [pages.header])
        finally:
            self._transfer.pool.give_pages(pages)
            osio.close_quietly(fd)
