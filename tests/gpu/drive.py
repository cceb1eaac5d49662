"""What tests/gpu/run.sh runs: LMCache's own connector for the device, the plugin behind it, and paged KV in memory.

For each layout and type: a context is stored, the engine is closed and made again, and the context is loaded into other
blocks. Checked, where the device is CUDA:

- every layer's blocks are the same, bit for bit;
- the staging ring is pinned;
- a slot is used again only after the event behind its copy: the stream that copies is kept busy, so that copies lie far
  behind the reads, and the ring holds few slots. A slot that was reused too soon would hold another chunk's bytes. That
  copies did lie behind is checked, too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

CHUNK, BLOCK = 256, 16
ROUNDS = 3
# Some 3 ms of a GPU's clock before each chunk's copy: more than its read takes.
BUSY_CYCLES = 5_000_000
GIB, MIB, GB = 1 << 30, 1 << 20, 1e9


class Case(msgspec.Struct, frozen=True):
    """A paged KV. *dense*: K and V apart, `[2, blocks, block, heads, head]`; *packed*: together in each head's row,
    `[blocks, block, heads, 2 * head]`, as newer releases of vLLM have it."""

    layout: str
    dtype: str
    layers: int = 32
    heads: int = 8
    head: int = 128

    @property
    def name(self) -> str:
        return f"{self.layout} {'fp8' if self.dtype == 'uint8' else self.dtype}"

    @property
    def chunk_bytes(self) -> int:
        return 2 * self.layers * CHUNK * self.heads * self.head * (2 if self.dtype == "bfloat16" else 1)

    def metadata(self) -> Any:
        import torch
        from lmcache.v1.metadata import LMCacheMetadata

        return LMCacheMetadata(
            model_name="gpu", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=getattr(torch, self.dtype), kv_shape=(self.layers, 2, CHUNK, self.heads, self.head),
            role="worker", chunk_size=CHUNK,
        )  # fmt: skip


# vLLM keeps fp8 KV as bytes.
CASES = tuple(Case(layout, dtype) for layout in ("dense", "packed") for dtype in ("bfloat16", "uint8"))


class PagedKv:
    """Layers of noise on a device, and the slots of one context in two sets of blocks: a source and a target."""

    def __init__(self, case: Case, tokens: int, device: str) -> None:
        import torch

        self.case, self.tokens = case, tokens
        blocks = tokens // BLOCK
        generator = torch.Generator(device=device).manual_seed(0)
        self.total = 2 * blocks + 3
        shape = (
            (2, self.total, BLOCK, case.heads, case.head)
            if case.layout == "dense"
            else (self.total, BLOCK, case.heads, 2 * case.head)
        )
        dtype = getattr(torch, case.dtype)
        raw = (*shape[:-1], shape[-1] * dtype.itemsize)
        self.layers = [
            torch.randint(0, 256, raw, dtype=torch.uint8, device=device, generator=generator).view(dtype)
            for _ in range(case.layers)
        ]
        order = torch.randperm(self.total, generator=torch.Generator().manual_seed(1))
        self._tables = [order[:blocks].to(device), order[blocks : 2 * blocks].to(device)]

    def slots(self, table: int) -> Any:
        import torch

        ids = self._tables[table]
        return (ids[:, None] * BLOCK + torch.arange(BLOCK, device=ids.device)[None]).flatten()

    def _blocks(self, layer: Any, table: int) -> Any:
        import torch

        by_block = layer.view(torch.uint8).movedim(1, 0) if self.case.layout == "dense" else layer.view(torch.uint8)
        return by_block[self._tables[table]]

    def clear_target(self) -> None:
        for layer in self.layers:
            (layer.view(dtype=layer.dtype).movedim(1, 0) if self.case.layout == "dense" else layer)[self._tables[1]] = 0

    def arrived(self) -> list[int]:
        """The layers whose target differs from the source: none, where all is well."""
        import torch

        return [
            i for i, layer in enumerate(self.layers) if not torch.equal(self._blocks(layer, 0), self._blocks(layer, 1))
        ]


class Lmcache:
    """An LMCacheEngine with the plugin as its only backend, and the connector LMCache has for the device."""

    def __init__(self, case: Case, directory: Path, device: str, staging_mib: int) -> None:
        from lmcache.utils import EngineType
        from lmcache.v1.cache_engine import LMCacheEngineBuilder
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.gpu_connector import CreateGPUConnector

        from lmcache_nvme_backend.doors import lmcache_compat
        from lmcache_nvme_backend.doors.cpu_connector import CpuBlockConnector

        lmcache_compat.apply_all(with_vllm=False)
        config = LMCacheEngineConfig.from_dict(
            {
                "chunk_size": CHUNK,
                "local_cpu": False,
                "max_local_cpu_size": 0,
                "storage_plugins": ["nvme"],
                "extra_config": {
                    "storage_plugin.nvme.module_path": "lmcache_nvme_backend",
                    "storage_plugin.nvme.class_name": "NvmeBackend",
                    "nvme.path": str(directory),
                    "nvme.quota_gib": 64,
                    "nvme.staging_mib": staging_mib,
                    "nvme.store_wait_ms": 600_000,
                    "nvme.model_fingerprint": case.name,
                },
            }
        )
        metadata = case.metadata()
        self._name = f"gpu-{case.name}-{time.monotonic_ns()}"
        connector = (
            CpuBlockConnector(metadata)
            if device == "cpu"
            else CreateGPUConnector(config, metadata, EngineType.VLLM, {"kv_layout": "NHD"})
        )
        self.engine: Any = LMCacheEngineBuilder.get_or_create(
            self._name, config, metadata, connector, lambda t, src: t, lambda o, src: o
        )
        self.engine.post_init()
        self.backend: Any = lmcache_compat.find_backend(self.engine.storage_manager)
        if self.backend is None:
            raise RuntimeError("the plugin was not constructed; set LMCACHE_LOG_LEVEL=INFO to see why")

    @property
    def ring(self) -> Any:
        return self.backend._allocator.ring

    def store(self, tokens: list[int], kv: PagedKv) -> float:
        """Seconds until the last byte is on the disk."""
        began = time.perf_counter()
        with self.backend.saving_step():
            self.engine.store(tokens, kvcaches=kv.layers, slot_mapping=kv.slots(0), offset=0, req_id="s")
        if not self.backend.wait_for_writes(120):
            raise RuntimeError("writes did not end")
        return time.perf_counter() - began

    def load(self, tokens: list[int], kv: PagedKv) -> float:
        """Seconds until the device has the last byte."""
        import torch

        mask = torch.ones(len(tokens), dtype=torch.bool)
        found = self.engine.lookup(tokens, lookup_id="l", pin=True)
        began = time.perf_counter()
        loaded = self.engine.retrieve(
            tokens, mask, kvcaches=kv.layers, slot_mapping=kv.slots(1), req_id="l", vllm_cached_tokens=0
        )
        seconds = time.perf_counter() - began
        self.engine.lookup_unpin("l")
        if int(found) != len(tokens) or int(loaded.sum()) != len(tokens):
            raise RuntimeError(f"{found} tokens found and {int(loaded.sum())} loaded of {len(tokens)}")
        return seconds

    def close(self) -> None:
        from lmcache.v1.cache_engine import LMCacheEngineBuilder

        LMCacheEngineBuilder.destroy(self._name)


class Found(msgspec.Struct):
    """What one case showed. Rates in GB/s; `behind` counts copies that were not done when their slot was asked for."""

    case: str
    store_gbps: float
    load_gbps: float
    pinned: bool
    behind: int
    wrong_layers: list[int]
    slots_back: bool


def prompt(tokens: int, turn: int) -> list[int]:
    return [(turn << 24) + i for i in range(tokens)]


def run_case(case: Case, directory: Path, device: str, gib: float, staging_mib: int) -> Found:
    """Round trips of a context of about `gib` GiB; the first through few slots, with copies that lie behind."""
    chunks = max(6, int(gib * GIB) // case.chunk_bytes)
    tokens = chunks * CHUNK
    kv = PagedKv(case, tokens, device)
    nbytes = chunks * case.chunk_bytes
    small = Lmcache(case, directory, device, -(-4 * case.chunk_bytes // MIB))
    small.store(prompt(tokens, 0), kv)
    small.close()

    wrong: set[int] = set()
    small = Lmcache(case, directory, device, -(-4 * case.chunk_bytes // MIB))  # as after a restart
    kv.clear_target()
    behind = keep_busy(small, device)
    small.load(prompt(tokens, 0), kv)
    wrong.update(kv.arrived())
    pinned, back = small.ring.pinned, small.ring.free == small.ring.slots
    small.close()

    whole = Lmcache(case, directory, device, staging_mib)
    stores, loads = [], []
    for turn in range(1, ROUNDS + 1):
        stores.append(nbytes / whole.store(prompt(tokens, turn), kv) / GB)
        kv.clear_target()
        loads.append(nbytes / whole.load(prompt(tokens, turn), kv) / GB)
        wrong.update(kv.arrived())
    back = back and whole.ring.free == whole.ring.slots
    whole.close()
    return Found(case.name, median(stores), median(loads), pinned, behind(), sorted(wrong), back)


def keep_busy(one: Lmcache, device: str) -> Callable[[], int]:
    """Make every copy of a load wait on the device, and count the events that were not there yet when recorded. On a
    CPU a copy is done when it returns: nothing can lie behind."""
    if device == "cpu":
        return lambda: 0
    import torch

    connector, loader = one.engine.gpu_connector, one.backend.loader
    copy, record = connector.to_gpu, loader._fence
    seen = [0]

    def to_gpu(*args: Any, **kw: Any) -> Any:
        torch.cuda._sleep(BUSY_CYCLES)
        return copy(*args, **kw)

    def fence() -> Any:
        event = record()
        seen[0] += not event.query()
        return event

    connector.to_gpu, loader._fence = to_gpu, fence
    return lambda: seen[0]


def failures(found: Found, device: str) -> list[str]:
    """What is not as it should be, in words."""
    wrong = []
    if found.wrong_layers:
        wrong.append(f"{found.case}: other bytes came back in layers {found.wrong_layers}")
    if not found.slots_back:
        wrong.append(f"{found.case}: slots did not come back")
    if device != "cpu" and not found.pinned:
        wrong.append(f"{found.case}: the staging ring is not pinned")
    if device != "cpu" and not found.behind:
        wrong.append(f"{found.case}: no copy lay behind, so nothing was shown about slots and events")
    return wrong


def why_skipped() -> str | None:
    """One line where there is nothing to run on; None where there is a CUDA device."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    try:
        import lmcache  # noqa: F401
    except ImportError:
        return "LMCache is not installed"
    return None


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Paged KV through the NVMe tier and back, on a CUDA device.")
    parser.add_argument("--directory", type=Path, default=Path.home(), help="on the drive to use")
    parser.add_argument("--gib", type=float, default=2.0, help="size of a context")
    parser.add_argument("--staging-mib", type=int, default=256)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(arguments)
    if (reason := why_skipped()) is not None:
        print(f"tests/gpu: skipped: {reason}.")
        return 0

    import torch

    from kvtier.detect.measure import copy_rates, disk_rates

    folder = Path(tempfile.mkdtemp(prefix="kvtier-gpu-", dir=options.directory))
    try:
        to_device, from_device = copy_rates()
        write, read = disk_rates(folder, 2 * GIB)
        print(f"device: {torch.cuda.get_device_name()}; pinned copy {_gb(to_device)} to it, {_gb(from_device)} back")
        print(f"drive: O_DIRECT, 8 MiB, one at a time: {_gb(write)} write, {_gb(read)} read")
        print(f"{'case':<18}{'store':>12}{'load':>12}  pinned  copies behind  bit-exact")
        rows, wrong = [], []
        for case in CASES:
            where = folder / case.name.replace(" ", "-")
            where.mkdir()
            found = run_case(case, where, "cuda", options.gib, options.staging_mib)
            shutil.rmtree(where)
            rows.append(found)
            wrong += failures(found, "cuda")
            print(
                f"{found.case:<18}{found.store_gbps:>7.2f} GB/s{found.load_gbps:>7.2f} GB/s  {found.pinned!s:<6}"
                f"{found.behind:>15}  {not found.wrong_layers}"
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for line in wrong:
        print(f"FAILED: {line}")
    if options.json is not None:
        rates = {"host_to_device": to_device, "device_to_host": from_device, "disk_write": write, "disk_read": read}
        document = {"rows": msgspec.to_builtins(rows), "device": torch.cuda.get_device_name(), "rates": rates}
        options.json.write_text(json.dumps(document, indent=1))
    return 1 if wrong else 0


def _gb(rate: float | None) -> str:
    return "not measured" if rate is None else f"{rate / GB:.2f} GB/s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
