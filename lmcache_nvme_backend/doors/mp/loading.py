"""From NVMe into LMCache's memory, one object at a time."""

from __future__ import annotations

from typing import Any

from lmcache.logging import init_logger

from lmcache_nvme_backend.doors.mp.objects import Lease, bytes_of, layout_of_object
from lmcache_nvme_backend.doors.mp.spaces import Chunk, Spaces
from lmcache_nvme_backend.store import Hit

logger = init_logger("lmcache_nvme_backend")

WRONG_LENGTH = "length"


class Loader:
    """Thread-safe; nothing is raised. What is not loaded leaves its object's bytes undefined, and is a miss."""

    def __init__(self, spaces: Spaces) -> None:
        self._spaces = spaces

    def run(self, key: Any, obj: Any, lease: Lease) -> tuple[Chunk | None, bool]:
        """The object's chunk, where it may be served, and whether its bytes are in `obj` now."""
        if lease.over:
            return None, False  # its memory may be another object's by now
        try:
            chunk = self._spaces.chunk(key, layout_of_object(obj))
            return chunk, chunk is not None and self._load(chunk, obj)
        except Exception:
            logger.exception("lmcache_nvme_backend: an object could not be loaded")
            return None, False

    def _load(self, chunk: Chunk, obj: Any) -> bool:
        into, store = bytes_of(obj), chunk.space.store
        result = store.get(chunk.name, into)
        if isinstance(result, Hit):
            if result.nbytes == len(into):
                return True
            store.remove(chunk.name)
            chunk.space.failed.add(WRONG_LENGTH)
        else:
            chunk.space.failed.add(result.cause.value)
        return False
