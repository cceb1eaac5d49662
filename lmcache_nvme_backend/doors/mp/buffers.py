"""Host memory for what is on its way to or from the store behind: a fixed number of bytes in all.

LMCache's own memory is never lent to that store: a transfer that comes late would write to where another chunk lies by
then, or read what is no longer the chunk it was.
"""

from __future__ import annotations

import mmap
import threading
from typing import Any

import torch
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj


class Buffer:
    """`view`: its bytes. `obj`: the same as an object that LMCache's adapters transfer."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        memory = mmap.mmap(-1, nbytes)  # page-aligned, for direct I/O
        self.view = memoryview(memory)[:nbytes]
        raw = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
        shape = torch.Size([nbytes])
        metadata = MemoryObjMetadata(
            shape, torch.uint8, raw.data_ptr(), nbytes, 1, fmt=MemoryFormat.BINARY, shapes=[shape], dtypes=[torch.uint8]
        )
        self.obj: Any = TensorMemoryObj(raw, metadata, None)


class Buffers:
    """Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._free: list[Buffer] = []
        self._allocated = 0  # free ones included
        self._closed = False

    def take(self, nbytes: int, wait_s: float) -> Buffer | None:
        """A buffer of exactly `nbytes`; None where none comes free within `wait_s` seconds."""
        with self._changed:
            if nbytes > self.limit_bytes or not self._changed.wait_for(lambda: self._room(nbytes), wait_s):
                return None
            if self._closed:
                return None
            for i, buffer in enumerate(self._free):
                if buffer.nbytes == nbytes:
                    return self._free.pop(i)
            while self._allocated + nbytes > self.limit_bytes:
                self._allocated -= self._free.pop(0).nbytes
            self._allocated += nbytes
        return Buffer(nbytes)

    def _room(self, nbytes: int) -> bool:
        free = sum(buffer.nbytes for buffer in self._free)
        same = any(buffer.nbytes == nbytes for buffer in self._free)
        return self._closed or same or self._allocated - free + nbytes <= self.limit_bytes

    def give(self, buffer: Buffer) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()

    @property
    def in_use(self) -> int:
        """Bytes that somebody holds."""
        with self._changed:
            return self._allocated - sum(buffer.nbytes for buffer in self._free)

    def close(self) -> None:
        """Nobody gets a buffer any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
