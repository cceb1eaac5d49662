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
