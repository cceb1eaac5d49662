"""LMCache's view of the staging ring: memory objects whose bytes are slots."""

from __future__ import annotations

import itertools
import threading
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


class SlotMemoryObj(TensorMemoryObj):
    """A chunk in a slot. Its last reference gives the slot back; so does its finaliser."""

    def __init__(self, slot: Slot, raw: torch.Tensor, metadata: MemoryObjMetadata, allocator: RingAllocator) -> None:
        super().__init__(raw, metadata, allocator)
        self.slot = slot

    def payload(self) -> memoryview:
        """The slot's bytes, whole pages; the chunk is the first ``get_size()`` of them."""
        return self.slot.view

    def narrow(self, shapes: list[torch.Size], dtypes: list[torch.dtype]) -> SlotMemoryObj:
        """Make this a partial chunk: fewer tokens of the same layout, at the head of the same slot."""
        size = sum(shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
        with self.lock:
            self.meta.shape, self.meta.shapes = shapes[0], shapes
            self.meta.dtype, self.meta.dtypes = dtypes[0], dtypes
            self.raw_data = self.raw_data[:size]
            ends = itertools.accumulate(s.numel() * d.itemsize for s, d in zip(shapes, dtypes, strict=True))
            self.group_prefix_sum = [0, *ends]
        return self


class RingAllocator(MemoryAllocatorInterface):
    """LMCache's allocator interface over a ``StagingRing``. A free slot, or ``None``: it never evicts."""

    def __init__(self, ring: StagingRing) -> None:
        self.ring = ring
        self._bytes = torch.frombuffer(ring.memory.view, dtype=torch.uint8)
        self._lock = threading.Lock()
        self.outstanding = 0

    def allocate(
        self,
        shapes: Any,
        dtypes: Any,
        fmt: MemoryFormat | None = MemoryFormat.KV_2LTD,
        allocator_type: str | None = None,
        timeout_s: float = 0.0,
    ) -> SlotMemoryObj | None:
        shapes, dtypes = self._adapt_shapes_and_dtypes(shapes, dtypes)
        size = sum(shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
        if not 0 < size <= self.ring.slot_bytes:
            return None
        slot = self.ring.acquire(timeout_s)
        if slot is None:
            return None
        start = slot.index * self.ring.slot_bytes
        metadata = MemoryObjMetadata(
            shape=shapes[0],
            dtype=dtypes[0],
            address=start,
            phy_size=self.ring.slot_bytes,
            ref_count=1,
            fmt=fmt or MemoryFormat.KV_2LTD,
            shapes=shapes,
            dtypes=dtypes,
        )
        with self._lock:
            self.outstanding += 1
        return SlotMemoryObj(slot, self._bytes[start : start + size], metadata, self)

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
        self.ring.release(memory_obj.slot)

    def batched_free(self, memory_objs: Any, allocator_type: str | None = None, update_stats: bool = True) -> None:
        for memory_obj in memory_objs:
            self.free(memory_obj)

    def memcheck(self) -> bool:
        """True where every slot is either free or held by a live object."""
        with self._lock:
            return self.ring.free + self.outstanding == self.ring.slots

    def close(self) -> None:
        self.ring.close()
