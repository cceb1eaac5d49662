"""LMCache's view of the staging ring: memory objects whose bytes are slots, held whole or streamed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lmcache.v1.memory_management import MemoryAllocatorInterface, MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from lmcache_nvme_backend.staging import Slot, StagingMemory, StagingRing


def device_memory(nbytes: int) -> StagingMemory:
    """Staging memory pinned by LMCache's platform layer where the device has pinning; plain memory on a CPU."""
    from lmcache.v1.platform import current_device_spec, torch_device_type

    if torch_device_type == "cpu":
        return StagingMemory(nbytes)
    return StagingMemory(nbytes, current_device_spec.pin_memory, current_device_spec.unpin_memory)


def size_of(shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype]) -> int:
    """Bytes of a chunk of these layer groups."""
    return sum(shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))


def _metadata(shapes: list[torch.Size], dtypes: list[torch.dtype], fmt: Any, capacity: int) -> MemoryObjMetadata:
    return MemoryObjMetadata(
        shape=shapes[0],
        dtype=dtypes[0],
        address=0,
        phy_size=capacity,
        ref_count=1,
        fmt=fmt or MemoryFormat.KV_2LTD,
        shapes=shapes,
        dtypes=dtypes,
    )


class SlotMemoryObj(TensorMemoryObj):
    """A chunk in a slot of its own. Its last reference gives the slot back; so does its finaliser."""

    raw_data: torch.Tensor

    def __init__(self, slot: Slot, raw: torch.Tensor, metadata: MemoryObjMetadata, allocator: RingAllocator) -> None:
        super().__init__(raw, metadata, allocator)
        self.slot = slot

    def payload(self) -> memoryview:
        """The slot's bytes, whole pages; the chunk is the first ``get_size()`` of them."""
        return self.slot.view

    def let_go(self) -> None:
        """Called once, by the allocator, when nobody refers to the chunk any more."""
        self.parent_allocator.ring.release(self.slot)

    def narrow(self, shapes: list[torch.Size], dtypes: list[torch.dtype]) -> SlotMemoryObj:
        """Make this a partial chunk: fewer tokens of the same layout, at the head of the same slot."""
        with self.lock:
            self.meta.shape, self.meta.shapes = shapes[0], shapes
            self.meta.dtype, self.meta.dtypes = dtypes[0], dtypes
            self.raw_data = self.raw_data[: size_of(shapes, dtypes)]
            ends = itertools.accumulate(s.numel() * d.itemsize for s, d in zip(shapes, dtypes, strict=True))
            self.group_prefix_sum = [0, *ends]
        return self


class StreamedMemoryObj(TensorMemoryObj):
    """A chunk that gets its slot when somebody asks for its bytes.

    ``take()`` answers with the slot, waiting for it; ``let_go`` is called with the last reference. Every accessor of
    LMCache's (``tensor``, ``byte_array``, ``data_ptr``, …) goes through ``raw_data``, so all of them stream.
    """

    def __init__(
        self,
        take: Callable[[], Slot],
        let_go: Callable[[], None],
        metadata: MemoryObjMetadata,
        allocator: RingAllocator,
    ) -> None:
        self._take, self._let_go = take, let_go
        self.target: Any = None  # of a store: what the saver knows of this chunk
        super().__init__(None, metadata, allocator)

    @property
    def raw_data(self) -> torch.Tensor:
        return self.parent_allocator.tensor(self._take(), self.group_prefix_sum[-1])

    @raw_data.setter
    def raw_data(self, _: Any) -> None:
        """Only the base class's constructor sets it: there are no bytes yet."""

    def let_go(self) -> None:
        self._let_go()


class RingAllocator(MemoryAllocatorInterface):
    """LMCache's allocator interface over a ``StagingRing``. A free slot, or ``None``: it never evicts."""

    def __init__(self, ring: StagingRing) -> None:
        self.ring = ring
        self._lock = threading.Lock()
        self.outstanding = 0  # objects that have not been freed

    def tensor(self, slot: Slot, nbytes: int) -> torch.Tensor:
        """The first ``nbytes`` of a slot as a flat uint8 tensor, without a copy."""
        return torch.frombuffer(slot.view, dtype=torch.uint8, count=nbytes)

    def allocate(
        self,
        shapes: Any,
        dtypes: Any,
        fmt: MemoryFormat | None = MemoryFormat.KV_2LTD,
        allocator_type: str | None = None,
        timeout_s: float = 0.0,
    ) -> SlotMemoryObj | None:
        shapes, dtypes = self._adapt_shapes_and_dtypes(shapes, dtypes)
        size = size_of(shapes, dtypes)
        if size <= 0 or not self.ring.fit(size):
            return None
        slot = self.ring.acquire(timeout_s, reclaim=True)
        if slot is None:
            return None
        self._count()
        return SlotMemoryObj(slot, self.tensor(slot, size), self._described(shapes, dtypes, fmt), self)

    def streamed(
        self, shapes: Any, dtypes: Any, fmt: Any, take: Callable[[], Slot], let_go: Callable[[], None]
    ) -> StreamedMemoryObj | None:
        """An object without a slot yet; ``None`` where the chunk does not fit into one."""
        shapes, dtypes = self._adapt_shapes_and_dtypes(shapes, dtypes)
        if not self.ring.fit(size_of(shapes, dtypes)):
            return None
        self._count()
        return StreamedMemoryObj(take, let_go, self._described(shapes, dtypes, fmt), self)

    def _described(self, shapes: Any, dtypes: Any, fmt: Any) -> MemoryObjMetadata:
        return _metadata(shapes, dtypes, fmt, self.ring.slot_bytes)

    def _count(self) -> None:
        with self._lock:
            self.outstanding += 1

    def batched_allocate(
        self,
        shapes: Any,
        dtypes: Any,
        batch_size: int,
        fmt: MemoryFormat | None = MemoryFormat.KV_2LTD,
        allocator_type: str | None = None,
        timeout_s: float = 0.0,
    ) -> list[SlotMemoryObj] | None:
        """All of ``batch_size`` or ``None``."""
        objs: list[SlotMemoryObj] = []
        for _ in range(batch_size):
            obj = self.allocate(shapes, dtypes, fmt, allocator_type, timeout_s)
            if obj is None:
                self.batched_free(objs)
                return None
            objs.append(obj)
        return objs

    def free(self, memory_obj: Any, allocator_type: str | None = None) -> None:
        with self._lock:
            if not memory_obj.is_valid():
                return
            memory_obj.invalidate()
            self.outstanding -= 1
        memory_obj.let_go()

    def batched_free(self, memory_objs: Any, allocator_type: str | None = None, update_stats: bool = True) -> None:
        for memory_obj in memory_objs:
            self.free(memory_obj)

    def memcheck(self) -> bool:
        """True where slots in use and objects alive agree: an idle ring has all its slots, and no object."""
        with self._lock:
            return self.outstanding > 0 or self.ring.free == self.ring.slots

    def close(self) -> None:
        self.ring.close()
