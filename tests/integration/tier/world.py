"""vLLM's real tiering manager and host tier around `NvmeTier`, without an engine; works with every vLLM since 0.29."""

from __future__ import annotations

import inspect
import mmap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from lmcache_nvme_backend.doors.hybrid_prefix import CacheGroup
from lmcache_nvme_backend.doors.tier.requests import Origin

ROW = 4 * mmap.PAGESIZE
HASH_TOKENS = 16
ATTENTION, STATE = 0, 1
WAIT_S = 30.0


class Region:
    """What the host tier asks of vLLM's shared region, in private memory."""

    def __init__(self, rows: int) -> None:
        self._memory = np.frombuffer(mmap.mmap(-1, rows * ROW), dtype=np.int8).reshape(rows, ROW)
        self.closed = False

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self._memory)

    def cleanup(self) -> None:
        self.closed = True


class Request:
    """The parts of vLLM's request that a tier reads."""

    def __init__(self, name: str, chunks: int, lora: Any = None) -> None:
        salt = f"{lora.lora_name}:{lora.lora_path}" if lora is not None else ""
        self.block_hashes = [f"{name}/{i}/{salt}".encode().ljust(32, b".") for i in range(chunks)]
        self.lora_request = lora


def offloading_config(groups: int = 1, model: str = "model", **parallel: Any) -> OffloadingConfig:
    numbered = "group_id" in OffloadingGroupConfig.__dataclass_fields__
    ranks = {"rank": 0, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1} | parallel
    return OffloadingConfig(
        groups=tuple(
            OffloadingGroupConfig(HASH_TOKENS, (f"layer.{i}",), **({"group_id": i} if numbered else {}))
            for i in range(groups)
        ),
        worker_kv_bytes_per_block=ROW, enable_kv_cache_events=False, extra_config={}, engine_id="e",
        model=OffloadingModelConfig(model, "bfloat16"), cache=OffloadingCacheConfig(HASH_TOKENS, 1),
        parallel=OffloadingParallelConfig(
            data_parallel_index=0, data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=False,
            **ranks,
        ),
    )  # fmt: skip


def entry(root: Path, **settings: Any) -> dict[str, Any]:
    """A tier's entry in `secondary_tiers`."""
    given = {"root_dir": str(root), "quota_gib": 0.25, "model_fingerprint": "test", **settings}
    return {"type": "NvmeTier", "module_path": "lmcache_nvme_backend", **given}


def create_tier(root: Path, view: memoryview, groups: int = 1, config: Any = None, **settings: Any) -> Any:
    spec: Any = SimpleNamespace(config=config or offloading_config(groups), blocks_per_chunk=1, kv_events_config=None)
    return SecondaryTierFactory.create_secondary_tier(entry(root, **settings), view, spec)


Make = Callable[..., "World"]


class World:
    """One engine's offloading, step by step. Context manager."""

    def __init__(self, root: Path, rows: int = 16, hybrid: bool = False, **settings: Any) -> None:
        self.region = Region(rows)
        noun = "chunks" if "num_chunks" in inspect.signature(CPUPrimaryTierOffloadingManager).parameters else "blocks"
        primary = CPUPrimaryTierOffloadingManager(**{f"num_{noun}": rows}, mmap_region=self.region)
        self.view = primary.get_kv_memoryview()
        self.flat = self.view.cast("B")
        self.tier = create_tier(root, self.view, 2 if hybrid else 1, **settings)
        if hybrid:  # what the KV cache's configuration says in an engine
            self.tier.groups = (CacheGroup(ATTENTION, 1), CacheGroup(STATE, 1, window=1))
        self.manager = TieringOffloadingManager(primary_tier=primary, secondary_tiers=[self.tier])
        self.contexts: dict[str, ReqContext] = {}

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.flat.release()
        self.manager.shutdown()

    # --- the engine's steps

    def begin(self, req_id: str, request: Request | None) -> ReqContext:
        context = self.contexts[req_id] = ReqContext(req_id=req_id)
        if request is not None:
            context.set_state(Origin(request))
        self.manager.on_new_request(context)
        return context

    def end(self, req_id: str) -> None:
        self.manager.on_request_finished(self.contexts.pop(req_id))
        self.step()

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))

    def settle(self) -> None:
        """Step until nothing is on its way."""
        deadline = time.monotonic() + WAIT_S
        while True:
            self.step()
            self.tier.drain_jobs()
            if not self.manager.has_pending_work():
                return
            assert time.monotonic() < deadline, "transfers do not end"

    def save(self, context: ReqContext, keys: Sequence[Any], content: dict[Any, bytes]) -> list[Any]:
        """What a worker has copied to the host is offered to the tier; the keys that the host tier took."""
        output = self.manager.prepare_store(list(keys), context)
        assert output is not None, "the host tier is full"
        for key, row in zip(output.keys_to_store, output.store_spec.block_ids, strict=True):
            self.flat[int(row) * ROW : (int(row) + 1) * ROW] = content[key]
        if output.keys_to_store:
            self.manager.complete_store(set(output.keys_to_store), context, True)
        return list(output.keys_to_store)

    def found(self, context: ReqContext, keys: Sequence[Any]) -> int:
        """Leading keys that can be loaded, asked as vLLM's scheduler asks: step by step until it knows."""
        deadline = time.monotonic() + WAIT_S
        while True:
            hits, waiting = 0, False
            for key in keys:
                result = self.manager.lookup(key, context)
                if result is LookupResult.MISS:
                    break
                waiting |= result is not LookupResult.HIT
                hits += result is LookupResult.HIT
            if not waiting:
                return hits
            self.step()
            self.tier.drain_jobs()
            assert time.monotonic() < deadline, "a lookup waits for ever"

    def rows(self, context: ReqContext, keys: Sequence[Any]) -> list[bytes]:
        """The bytes that a worker would load."""
        spec = self.manager.prepare_load(list(keys), context)
        content = [bytes(self.flat[int(row) * ROW : (int(row) + 1) * ROW]) for row in spec.block_ids]
        self.manager.complete_load(list(keys), context)
        return content

    def forget_host(self) -> None:
        """Empty the host tier, as evictions would."""
        self.settle()
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):  # since 0.33: workers write to no row any more
            self.manager.on_reset_flushed()


def save_all(world: World, req_id: str, request: Request, keys: Sequence[Any] | None = None) -> None:
    """One request, whose chunks are on the disk when it has ended."""
    context = world.begin(req_id, request)
    keys = keys_of(request) if keys is None else keys
    world.save(context, keys, noise(keys))
    world.settle()
    world.end(req_id)


def keys_of(request: Request, group: int = ATTENTION) -> list[Any]:
    return [make_offload_key(block_hash, group) for block_hash in request.block_hashes]


def noise(keys: Sequence[Any]) -> dict[Any, bytes]:
    """Bytes that belong to each key and no other."""
    return {key: np.random.default_rng(list(key)).bytes(ROW) for key in keys}


def chunk_files(root: Path) -> list[Path]:
    """Heads first."""
    return sorted(root.glob("v1/*/*/*.kv"), key=lambda path: path.name.split("-")[1])
