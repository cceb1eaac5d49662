"""Page-aligned host memory, pinned where the device wants it pinned."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable


class StagingMemory:
    """One anonymous, page-aligned mapping.

    ``pin(address, nbytes)`` is the door's: it registers the mapping with the device and answers whether that worked;
    ``unpin(address)`` undoes it. Pages are touched only when used, so an idle ring costs no memory; a pinned one is
    resident from the start.
    """

    def __init__(
        self,
        nbytes: int,
        pin: Callable[[int, int], bool] | None = None,
        unpin: Callable[[int], bool] | None = None,
    ) -> None:
        self._map = mmap.mmap(-1, nbytes)
        try:
            # A direct transfer is cut into requests of so many pieces of physical memory (254 on virtio): with pages of
            # 4 KiB that is 1 MiB each, with large ones the drive's own limit.
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without them
        self.view = memoryview(self._map)
        self.nbytes = nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._unpin = unpin
        self.pinned = bool(pin(self.address, nbytes)) if pin is not None else False

    def close(self) -> None:
        """Give the device registration back. The mapping itself goes with its last view (a tensor may hold one)."""
        if self.pinned and self._unpin is not None:
            self._unpin(self.address)
        self.pinned = False
