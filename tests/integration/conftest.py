"""Real LMCache around the plugin, without an engine: its StorageManager, its cache engine, CPU tensors."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("lmcache")

import torch
from lmcache.v1.cache_engine import LMCacheEngine, LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata

from lmcache_nvme_backend.doors import lmcache_compat, start
from lmcache_nvme_backend.doors.cpu_connector import CpuBlockConnector

LAYERS, HEADS, HEAD_SIZE, BLOCK, CHUNK = 3, 2, 16, 32, 256
_names = itertools.count()


def lmcache_config(path: Path, *, cpu_gib: float = 0, plugins: tuple[str, ...] = ("nvme",), **nvme: Any) -> Any:
    """The documented entry, with a small ring and changes by keyword (``staging_mib=2``); a None leaves a key out."""
    top = {k: nvme.pop(k) for k in ("use_layerwise", "enable_pd", "enable_async_loading", "local_disk") if k in nvme}
    top |= {k: nvme.pop(k) for k in ("save_unfull_chunk", "enable_blending") if k in nvme}
    settings = {"path": str(path), "quota_gib": 1, "staging_mib": 8, "model_fingerprint": "test", **nvme}
    extra = {
        "storage_plugin.nvme.module_path": "lmcache_nvme_backend",
        "storage_plugin.nvme.class_name": "NvmeBackend",
        **{f"nvme.{k}": v for k, v in settings.items() if v is not None},
    }
    return LMCacheEngineConfig.from_dict(
        {
            "chunk_size": CHUNK,
            "local_cpu": cpu_gib > 0,
            "max_local_cpu_size": cpu_gib,
            "pre_caching_hash_algorithm": "sha256_cbor",
            "storage_plugins": list(plugins),
            "extra_config": extra,
            **top,
        }
    )


def lmcache_metadata(dtype: torch.dtype = torch.bfloat16, mla: bool = False, rank: int = 0, world: int = 1) -> Any:
    return LMCacheMetadata(
        model_name="model", world_size=world, local_world_size=world, worker_id=rank, local_worker_id=rank,
        kv_dtype=dtype, kv_shape=(LAYERS, 1 if mla else 2, CHUNK, 1 if mla else HEADS, HEAD_SIZE), use_mla=mla,
        role="worker", chunk_size=CHUNK,
    )  # fmt: skip


class PagedKv:
    """Layers of paged KV as vLLM keeps them on a CPU, filled with noise, and the slots of one request in them."""

    def __init__(self, tokens: int, dtype: torch.dtype = torch.bfloat16, mla: bool = False, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        blocks = -(-tokens // BLOCK)
        shape = (2 * blocks + 3, BLOCK, HEAD_SIZE) if mla else (2 * blocks + 3, HEADS, BLOCK, 2 * HEAD_SIZE)
        raw_shape = (*shape[:-1], shape[-1] * dtype.itemsize)
        self.layers = [
            torch.randint(0, 256, raw_shape, dtype=torch.uint8, generator=generator).view(dtype) for _ in range(LAYERS)
        ]
        self.tables = torch.randperm(shape[0], generator=generator)
        self.tokens = tokens

    def slots(self, table: int = 0) -> torch.Tensor:
        """Slot mapping of the request's first or second set of blocks."""
        blocks = -(-self.tokens // BLOCK)
        ids = self.tables[table * blocks : (table + 1) * blocks]
        return (ids[:, None] * BLOCK + torch.arange(BLOCK)[None]).flatten()[: self.tokens]

    def content(self, table: int = 0, tokens: int | None = None) -> list[torch.Tensor]:
        """Bytes of the first ``tokens`` of a request's blocks, a layer each."""
        blocks = (self.tokens if tokens is None else tokens) // BLOCK
        ids = self.slots(table)[::BLOCK][:blocks] // BLOCK
        return [layer.view(torch.uint8)[ids].clone() for layer in self.layers]


class Lmcache:
    """One LMCacheEngine with the plugin, and what a vLLM worker does with it."""

    def __init__(self, config: Any, metadata: Any) -> None:
        self.name = f"test-{next(_names)}"
        lmcache_compat.apply_all(with_vllm=False)
        self.engine: LMCacheEngine = LMCacheEngineBuilder.get_or_create(
            self.name, config, metadata, CpuBlockConnector(metadata), lambda t, src: t, lambda o, src: o
        )
        self.engine.post_init()
        self.backend: Any = lmcache_compat.find_backend(self.engine.storage_manager)

    def store(
        self,
        tokens: list[int],
        kv: PagedKv,
        table: int = 0,
        skip: int = 0,
        request: str = "r",
        step: bool = True,
        **kw: Any,
    ) -> None:
        """One request's stores, in an engine step of their own unless ``step`` is False."""
        mask = torch.ones(len(tokens), dtype=torch.bool)
        mask[:skip] = False
        with self.backend.saving_step() if step else nullcontext():
            self._store(tokens, mask, kv, table, skip, request, kw)

    def _store(self, tokens: Any, mask: Any, kv: PagedKv, table: int, skip: int, request: str, kw: Any) -> None:
        self.engine.store(
            tokens, mask=mask, kvcaches=kv.layers, slot_mapping=kv.slots(table), offset=skip, req_id=request, **kw
        )

    def lookup(self, tokens: list[int], request: str = "r", **kw: Any) -> int:
        return int(self.engine.lookup(tokens, lookup_id=request, pin=True, **kw))

    def retrieve(
        self, tokens: list[int], kv: PagedKv, table: int = 1, request: str = "r", cached: int = 0, **kw: Any
    ) -> int:
        """Tokens loaded into the request's other blocks."""
        mask = torch.ones(len(tokens), dtype=torch.bool)
        mask[: cached // CHUNK * CHUNK] = False
        loaded = self.engine.retrieve(
            tokens,
            mask,
            kvcaches=kv.layers,
            slot_mapping=kv.slots(table),
            req_id=request,
            vllm_cached_tokens=cached,
            **kw,
        )
        self.engine.lookup_unpin(request)
        return int(loaded.sum())

    def end_step(self) -> None:
        """A step that stores nothing."""
        with self.backend.saving_step():
            pass

    def settle(self) -> None:
        """Wait for the writes behind to finish."""
        self.backend.wait_for_writes(30)

    def close(self) -> None:
        LMCacheEngineBuilder.destroy(self.name)


def wait_for_slots(backend: Any) -> None:
    """A read that is under way when its stream ends gives its slot back when the drive has finished."""
    ring = backend._allocator.ring if backend._allocator is not None else None
    deadline = time.monotonic() + 10
    while ring is not None and ring.free < ring.slots and time.monotonic() < deadline:
        time.sleep(0.005)


@pytest.fixture(scope="session", autouse=True)
def quick_engines() -> Iterator[None]:
    """Every LMCache engine collects all garbage, a second where vLLM is loaded, and looks around for its telemetry,
    two more: neither is what the tests are about."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LMCACHE_TRACK_USAGE", "false")
        gc.collect()
        gc.freeze()
        yield
        gc.unfreeze()


@pytest.fixture
def lmcache(tmp_path: Path) -> Iterator[Any]:
    """A factory of engines on one root; whatever a test made is closed, and every slot must have come back."""
    made: list[Lmcache] = []

    def make(metadata: Any = None, path: Path = tmp_path, **changes: Any) -> Lmcache:
        made.append(Lmcache(lmcache_config(path, **changes), metadata or lmcache_metadata()))
        return made[-1]

    start.take_failure()
    yield make
    for one in made:
        if one.backend is not None and not one.backend._closed:
            one.settle()
            wait_for_slots(one.backend)
            assert one.backend.get_memory_allocator().memcheck()
            if one.backend._cpu is None:
                assert one.backend._allocator.ring.free == one.backend._allocator.ring.slots
        one.close()


def prompt(tokens: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 30000, (tokens,), generator=generator).tolist()
