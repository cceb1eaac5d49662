"""Real vLLM on the CPU with the store behind any of the doors that go past LMCache's in-process mode."""

from __future__ import annotations

import fcntl
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from kvtier.doors import native_transfer, tier_transfer
from kvtier.engine import Engine, EngineSpec
from kvtier.lmcache_server import LmcacheServer, LmcacheServerSpec, nvme_adapter
from kvtier.scrape import Metrics
from tests.engine.conftest import Tiered

CHUNK = 256
HOST_MIB = 16  # vLLM's buffer in front of NvmeTier: 16 chunks of the random Llama in float32
L1_GB = 1.0


def prompt(seed: int, tokens: int = 1500) -> list[int]:
    """Token ids that no other seed begins with."""
    numbers = random.Random(seed)
    return [numbers.randrange(64, 400) for _ in range(tokens)]


class Door(Tiered):
    """An engine and, with LMCache's server, the server's numbers."""

    def __init__(self, engine: Engine, root: Path, server: LmcacheServer | None) -> None:
        super().__init__(engine, root)
        self.server = server

    def answer(self, tokens: list[int], max_tokens: int = 12) -> tuple[list[int], int]:
        """Greedy token ids, and how many of the prompt's tokens came from the tier, by vLLM's own count."""
        before = self.tokens("external_kv_transfer")
        body = {
            "model": self.engine.spec.served_name, "prompt": tokens, "max_tokens": max_tokens, "temperature": 0,
            "return_token_ids": True,
        }  # fmt: skip
        reply = httpx.post(f"{self.engine.url}/v1/completions", json=body, timeout=600).raise_for_status()
        return reply.json()["choices"][0]["token_ids"], int(self.tokens("external_kv_transfer") - before)

    def numbers(self) -> Metrics:
        return self.engine.metrics() if self.server is None else self.server.metrics()

    def count(self, name: str, **labels: str) -> float:
        """A metric of the tier, once it has come to rest."""
        last, deadline = None, time.monotonic() + 30
        while time.monotonic() < deadline:
            value = self.numbers().value(name, **labels)
            if value == last:
                return value
            last = value
            time.sleep(0.6)
        raise AssertionError(f"{name} does not come to rest: {last}")

    def settle(self) -> None:
        """Wait for the writes behind, and empty vLLM's own prefix cache."""
        self.count("kvtier_chunks_stored_total")
        self.forget()


@contextmanager
def serve(
    door: str,
    model: Path,
    root: Path,
    folder: Path,
    *,
    quota_gib: float,
    mixed: bool = False,
    args: tuple[str, ...] = (),
    env: dict[str, str | None] | None = None,
    host_mib: int = HOST_MIB,
    max_model_len: int = 4096,
    **settings: Any,
) -> Iterator[Door]:
    """One life of an engine on `root`, its logs in `folder`. `mixed`: its layers are of several sorts."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        server = None
        if door == "mp":
            adapter = nvme_adapter(root, quota_gib, **{"staging_mib": 32, **settings})
            spec = LmcacheServerSpec(log=folder / "server.log", l2_adapters=(adapter,), l1_gb=L1_GB)
            server = stack.enter_context(LmcacheServer(spec))
            transfer = server.kv_transfer
        elif door == "native":
            transfer = native_transfer(str(root), quota_gib, mixed=mixed, **{"staging_mib": 32, **settings})
        else:
            transfer = tier_transfer(str(root), quota_gib, host_mib << 20, mixed=mixed, on_cpu=True, **settings)
        # float32: batching then never changes a greedy token. vLLM's delta nets on a CPU take bfloat16 alone.
        dtype = ("--dtype", "bfloat16" if mixed else "float32")
        engine = Engine(
            EngineSpec(
                model=model, log=folder / "engine.log", max_model_len=max_model_len, max_num_batched_tokens=1024,
                args=("--kv-transfer-config", json.dumps(transfer), *dtype, *args),
                env={"VLLM_SERVER_DEV_MODE": "1", **(env or {})}, ready_timeout_s=600,
            )
        )  # fmt: skip
        stack.callback(engine.stop)
        yield Door(engine, root, server)


class Scales:
    """Weighs all files under a root every few milliseconds, for the time of a block; `peak` is in bytes."""

    def __init__(self, root: Path, quota_gib: float) -> None:
        self._root, self._quota, self._stop = root, int(quota_gib * 2**30), threading.Event()
        self.peak = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            self.peak = max(self.peak, self._weigh())

    def _weigh(self) -> int:
        """A sum above the quota is looked at again with the root's lock held: a chunk that is renamed between two looks
        has been counted twice."""
        found = _bytes(self._root)
        if found > self._quota:
            with (self._root / "v1" / "account").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                found = _bytes(self._root)
        return found

    @property
    def within_quota(self) -> bool:
        return self.peak <= self._quota

    def __enter__(self) -> Scales:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _bytes(root: Path) -> int:
    return sum(_size(path) for path in root.rglob("*"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # it has gone meanwhile
        return 0
