"""Copies between the device's blocks and a staging slot, complete when they return.

Any thread may copy. A *mark* is taken on the engine's thread when a transfer is submitted; the copies of that transfer
wait on the device for what was issued before it: for a store the forward pass that wrote the blocks, for a load the
zeroing of blocks that are about to be filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from lmcache_nvme_backend.doors.native.layout import BlockRun, GroupLayout
from lmcache_nvme_backend.staging import Slot


class Copier(Protocol):
    def mark(self) -> Any: ...
    def to_slot(self, slot: Slot, layout: GroupLayout, runs: Sequence[BlockRun], mark: Any) -> None: ...
    def to_device(self, slot: Slot, layout: GroupLayout, runs: Sequence[BlockRun], mark: Any) -> None: ...


class CpuCopier:
    """Blocks in host memory, by memcpy. The engine's thread has finished with them when it submits.

    numpy copies without the interpreter's lock and in the calling thread; torch's copies would take its pool of threads
    from the model.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._rows = [as_rows(tensor).numpy() for tensor in tensors]

    def mark(self) -> None:
        return None

    def to_slot(self, slot: Slot, layout: GroupLayout, runs: Sequence[BlockRun], mark: Any) -> None:
        for piece, view in self._pieces(slot, layout):
            rows = self._rows[piece.tensor]
            for run in runs:
                source = rows[run.block : run.block + run.count, : piece.page_bytes]
                np.copyto(view[run.at : run.at + run.count], source)

    def to_device(self, slot: Slot, layout: GroupLayout, runs: Sequence[BlockRun], mark: Any) -> None:
        for piece, view in self._pieces(slot, layout):
            rows = self._rows[piece.tensor]
            for run in runs:
                target = rows[run.block : run.block + run.count, : piece.page_bytes]
                np.copyto(target, view[run.at : run.at + run.count])

    def _pieces(self, slot: Slot, layout: GroupLayout) -> Any:
        for piece in layout.pieces:
            size = piece.page_bytes * layout.blocks
            flat = np.frombuffer(slot.view, np.int8, size, piece.offset)
            yield piece, flat.reshape(layout.blocks, piece.page_bytes)


class StreamCopier:
    """Blocks in the memory of a CUDA or XPU device, on one stream a thread; a slot's memory is pinned.

    Written by the pattern of vLLM's own worker for CPU offloading; it has not run on a device.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        import threading

        from vllm import _custom_ops
        from vllm.platforms import current_platform

        self._ops, self._platform = _custom_ops, current_platform
        self._tensors = [as_rows(tensor) for tensor in tensors]
        self._device = self._tensors[0].device
        self._pointers = torch.uint64 if current_platform.is_xpu() else torch.int64
        self._of_thread = threading.local()

    def mark(self) -> Any:
        event = torch.Event(device=self._device)
        event.record(self._platform.current_stream())
        return event

    def to_slot(self, slot: Slot, layout: GroupLayout, runs: Sequence[BlockRun], mark: Any) -> None:
        device, host, sizes = self._addresses(slot, layout, runs)
        # The device still writes other blocks: its reads stay in the order of the stream.
        self._copy(device, host, sizes, mark, in_any_order=False)

    def to_device(self, slot: Slot, layout: GroupLayout, runs: Sequence[BlockRun], mark: Any) -> None:
        device, host, sizes = self._addresses(slot, layout, runs)
        self._copy(host, device, sizes, mark, in_any_order=True)

    def _addresses(
        self, slot: Slot, layout: GroupLayout, runs: Sequence[BlockRun]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        base = np.frombuffer(slot.view, np.int8).ctypes.data
        device: list[int] = []
        host: list[int] = []
        sizes: list[int] = []
        for piece in layout.pieces:
            tensor = self._tensors[piece.tensor]
            start, stride = tensor.data_ptr(), tensor.stride(0)
            for run in runs:
                for i in range(run.count):
                    device.append(start + (run.block + i) * stride)
                    host.append(base + piece.offset + (run.at + i) * piece.page_bytes)
                    sizes.append(piece.page_bytes)
        return (
            torch.tensor(device, dtype=self._pointers),
            torch.tensor(host, dtype=self._pointers),
            torch.tensor(sizes, dtype=self._pointers),
        )

    def _copy(
        self, source: torch.Tensor, target: torch.Tensor, sizes: torch.Tensor, mark: Any, in_any_order: bool
    ) -> None:
        stream = getattr(self._of_thread, "stream", None)
        if stream is None:
            self._platform.set_device(self._device)
            stream = self._of_thread.stream = self._platform.Stream()
        stream.wait_event(mark)
        with self._platform.stream(stream):
            self._ops.swap_blocks_batch(source, target, sizes, is_src_access_order_any=in_any_order)
            done = torch.Event(device=self._device)
            done.record(stream)
        done.synchronize()


def make_copier(tensors: Sequence[torch.Tensor]) -> Copier:
    return CpuCopier(tensors) if tensors[0].device.type == "cpu" else StreamCopier(tensors)


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """``[blocks, bytes]`` of vLLM's canonical tensors, whose rows may be further apart than they are long."""
    return tensor if tensor.dtype == torch.int8 and tensor.dim() == 2 else tensor.view(torch.int8).flatten(1)
