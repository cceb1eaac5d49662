"""LMCache's own storage manager around the adapter, without server and engine: L1 in host memory, CPU tensors."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("lmcache")

import torch
from lmcache.v1.distributed import config as lmcache_config
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.storage_manager import StorageManager

SHAPE = (2, 3, 256, 32)  # K and V, layers, tokens, heads * head size
OBJECT_BYTES = 96 << 10  # of that shape, in 16 bits
MODEL = "models/llama#kvtier-" + "ab" * 16


def layout(dtype: torch.dtype = torch.bfloat16, shape: Sequence[int] = SHAPE) -> Any:
    return MemoryLayoutDesc(shapes=[torch.Size(shape)], dtypes=[dtype])


def keys(count: int, seed: int = 0, *, model: str = MODEL, salt: str = "", rank: int = 0, world: int = 1) -> list[Any]:
    """The keys of a prefix of `count` chunks that no other seed shares."""
    kv_rank = ObjectKey.ComputeKVRank(world, rank, world, rank)
    return [ObjectKey(bytes([seed]) + i.to_bytes(31, "big"), model, kv_rank, cache_salt=salt) for i in range(count)]


def content(key: Any, size: int) -> torch.Tensor:
    """The bytes of an object, another for every key."""
    seed = hash((key.chunk_hash, key.cache_salt, key.kv_rank)) & 0x7FFFFFFF
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def raw(obj: Any) -> torch.Tensor:
    """An object's bytes, as they lie in LMCache's memory."""
    return torch.frombuffer(obj.byte_array, dtype=torch.uint8)


class Node:
    """One LMCache server's storage, as its modules use it."""

    def __init__(self, params: dict[str, Any], l1_gb: float = 0.05, adapter: dict[str, Any] | None = None) -> None:
        spec = {"type": "plugin", "module_path": "lmcache_nvme_backend", "class_name": "NvmeL2Adapter"}
        spec |= {"adapter_params": params, **(adapter or {})}
        parser = argparse.ArgumentParser()
        lmcache_config.add_storage_manager_args(parser)
        arguments = ["--l1-size-gb", str(l1_gb), "--eviction-policy", "LRU", "--l2-adapter", json.dumps(spec)]
        parsed = parser.parse_args(arguments, argparse.Namespace(shm_name=""))  # its name is the process's: one each
        self.manager: Any = StorageManager(lmcache_config.parse_args_to_config(parsed))
        self.adapter: Any = next(iter(self.manager._l2_adapters.values()))
        self._closed = False
        self._written = self._submitted = 0
        self._count_submitted()

    def store(self, what: Sequence[Any], desc: Any = None) -> None:
        """Write the objects to L1, and wait until L2 has taken them."""
        reserved = self.manager.reserve_write(list(what), desc or layout())
        assert len(reserved) == len(what)
        for key, obj in reserved.items():
            raw(obj)[:] = content(key, obj.get_size())
        self._written += len(what)
        self.manager.finish_write(list(what))
        self.settle()

    def _count_submitted(self) -> None:
        """Count what LMCache's store controller hands over: between its queue and its tasks it says nothing of it."""
        submit = self.adapter.submit_store_task

        def counted(what: list[Any], objects: list[Any]) -> int:
            task: int = submit(what, objects)
            self._submitted += len(what)
            return task

        self.adapter.submit_store_task = counted

    def settle(self) -> None:
        """Until L2 has been given all that was written to L1, and LMCache has nothing in flight."""
        wait_for(lambda: self._submitted >= self._written)
        quiet = 0
        deadline = time.monotonic() + 20
        while quiet < 3 and time.monotonic() < deadline:
            status = self.manager._store_controller.report_status()
            busy = status["pending_keys_count"] or status["in_flight_task_count"]
            quiet = 0 if busy else quiet + 1
            time.sleep(0.02)
        assert quiet >= 3

    def lookup(self, what: Sequence[Any], desc: Any = None) -> tuple[int, Any]:
        """How many leading objects are in L1 now, locked for `read`, loaded from L2 where need be; and the handle."""
        handle = self.manager.submit_prefetch_task(
            PrefetchTaskSpec([GroupedObjectKeys(list(what), 0, desc or layout())])
        )
        assert self.manager.wait_prefetch_status(handle, 20)
        answer = self.manager.query_prefetch_status(handle)
        return int(answer.hit_cells[0].count_leading_ones()), answer

    def read(self, what: Sequence[Any]) -> list[torch.Tensor]:
        """Copies of the bytes that a lookup has locked; unlocked afterwards."""
        with self.manager.read_prefetched_results(list(what)) as objects:
            assert objects is not None
            found = [raw(obj).clone() for obj in objects]
        self.manager.finish_read_prefetched(list(what))
        return found

    def fetch(self, what: Sequence[Any], desc: Any = None) -> int:
        """Look up, compare every byte of what was found, unlock; how many leading objects were found."""
        count, _ = self.lookup(what, desc)
        if count:
            for key, found in zip(what[:count], self.read(what[:count]), strict=True):
                assert torch.equal(found, content(key, len(found)))
        return count

    def forget(self) -> None:
        """Empty L1, as a restart would."""
        self.manager._l1_manager.clear(force=True)

    @property
    def root(self) -> Path:
        adapter = getattr(self.adapter, "inner_adapter", self.adapter)
        return Path(adapter.settings.tier.path)

    def chunks(self) -> list[Path]:
        """Chunk files, heads first."""
        return sorted(self.root.glob("v1/*/*/*.kv"), key=lambda path: int(path.name.split("-")[1], 16))

    def count(self, what: str) -> int:
        """A counter of all models together: of lookups, loads that failed, or stores that were dropped."""
        spaces = self.adapter.spaces.all()
        return sum(c.snapshot().get(what, 0) for space in spaces for c in (space.lookups, space.failed, space.dropped))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.manager.close()


def wait_for(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.01)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """A factory of servers' storages on one root; what a test leaves open is closed."""
    made: list[Node] = []

    def make(root: Path = tmp_path / "root", adapter: dict[str, Any] | None = None, **params: Any) -> Node:
        root.mkdir(exist_ok=True)
        settings = {"root_dir": str(root), "quota_gib": 0.5, "staging_mib": 4, **params}
        made.append(Node({k: v for k, v in settings.items() if v is not None}, adapter=adapter))
        return made[-1]

    yield make
    for one in made:
        one.close()
