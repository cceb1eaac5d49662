"""From LMCache's memory to NVMe: in the order of the prefix, never half of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from lmcache.logging import init_logger

from lmcache_nvme_backend.doors.counts import PREFIX_LOST
from lmcache_nvme_backend.doors.mp.objects import Lease, bytes_of, layout_of_object
from lmcache_nvme_backend.doors.mp.spaces import Chunk, Spaces
from lmcache_nvme_backend.store import ChunkKey, PutResult

logger = init_logger("lmcache_nvme_backend")

# The disk was so slow that LMCache's lock on the object's memory may have ended.
TOO_LATE = "too late"


class Saved(msgspec.Struct):
    """What became of a batch. `ok` is false where something failed that should have worked."""

    ok: bool = True
    nbytes: int = 0  # written to the disk
    kept: list[tuple[Any, Chunk, int]] = []  # the objects that are here now that were not: key, chunk, bytes
    new: list[tuple[Any, Chunk, Any]] = []  # key, chunk and object of what another host might want


class Saver:
    """Thread-safe; nothing is raised. The objects' memory is read until `run` returns, and as long as its lease."""

    def __init__(self, spaces: Spaces) -> None:
        self._spaces = spaces

    def run(self, keys: Sequence[Any], objects: Sequence[Any], lease: Lease) -> Saved:
        saved = Saved()
        lost: set[ChunkKey] = set()
        for key, obj in zip(keys, objects, strict=True):
            try:
                self._save(key, obj, saved, lost, lease)
            except Exception:
                logger.exception("lmcache_nvme_backend: an object could not be stored")
                saved.ok = False
        return saved

    def _save(self, key: Any, obj: Any, saved: Saved, lost: set[ChunkKey], lease: Lease) -> None:
        chunk = self._spaces.chunk(key, layout_of_object(obj))
        if chunk is None:
            return
        space, name = chunk.space, chunk.name
        depth, parent = space.book.place(name)
        payload = bytes_of(obj)
        if parent in lost:
            lost.add(name)
            space.dropped.add(PREFIX_LOST)
            return
        result = None
        if not space.store.contains(name, depth=depth):
            result = space.store.refusal(name, len(payload))
        if lease.over:
            result = None
        elif result is None:
            result = space.store.put(name, payload, depth=depth, parent=parent)
            if lease.over and result is PutResult.STORED:
                space.store.remove(name)  # nobody knows what its memory held in the end
                result = None
        if result is None:
            lost.add(name)
            space.dropped.add(TOO_LATE)
            saved.ok = False
            return
        if not result.kept:
            lost.add(name)
            space.dropped.add(result.value)
        if result is PutResult.STORED:
            saved.nbytes += len(payload)
            saved.kept.append((key, chunk, len(payload)))
        elif not result.kept and not result.decided:
            saved.ok = False  # a decision is no failure: LMCache may forget the object, and no disk is in trouble
        # Worth a transfer is what was not here before, so that another host may want it, and was not decided against.
        if not result.decided and result not in (PutResult.EXISTS, PutResult.BUSY):
            saved.new.append((key, chunk, obj))
