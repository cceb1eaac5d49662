"""What a restore through vLLM's own offloading costs others: the second part of `native.py`.

A real engine (SmolLM2) in which two sequences are being decoded while prompts come back one after the other from the
drive: the pool holds fewer prompts than take turns. Beside it the same with prompts that the pool does hold, while
another process copies as many bytes from memory to memory at the same times. Rounds alternate; the figure is the 99th
percentile of the time between two tokens of the two sequences.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from rows import Row

from kvtier.engine import Engine, EngineSpec
from kvtier.model import find_model

# Whole chunks of 256, and behind them as few tokens to compute after a restore as after a hit in the pool.
PROMPT_TOKENS, DECODED = 15 * 256 + 32, 240
# Prompts that take turns: more than the pool holds, and as many as it holds for good.
TURNS_TIER, TURNS_POOL = 5, 1
POOL_BLOCKS_SHARE = 3  # prompts of room beside the two sequences


def copy_on_demand(pipe: Any, largest: int) -> None:
    """Another process: copies as many bytes as it is told, once, with one thread."""
    import numpy as np

    source, target = np.ones(largest, np.int8), np.zeros(largest, np.int8)
    pipe.send(None)
    while (nbytes := pipe.recv()) > 0:
        np.copyto(target[:nbytes], source[:nbytes])
        pipe.send(None)


class Copier:
    """That process."""

    def __init__(self, largest: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        self._process = spawn.Process(target=copy_on_demand, args=(other, largest), daemon=True)
        self._process.start()
        self._pipe.recv()

    def copy(self, nbytes: int) -> None:
        self._pipe.send(nbytes)

    def wait(self) -> None:
        self._pipe.recv()

    def end(self) -> None:
        self._pipe.send(0)
        self._process.join(10)
        self._process.kill()


def prompt(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    return [100 + (seed * 7919 + i * 31 + i // 7 * 5) % 40_000 for i in range(tokens)]


def gaps_of(engine: Engine, seed: int) -> list[float]:
    """Seconds between the tokens of one decoded sequence."""
    import httpx

    body = {
        "model": engine.spec.served_name, "prompt": prompt(seed, 64), "max_tokens": DECODED, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    times: list[float] = []
    with httpx.stream("POST", f"{engine.url}/v1/completions", json=body, timeout=600) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(times)]


class Others:
    """The engine, its prompts, and the two sequences that are decoded meanwhile."""

    def __init__(self, engine: Engine, bytes_of_a_prompt: int) -> None:
        self.engine, self.nbytes = engine, bytes_of_a_prompt
        self.copier = Copier(bytes_of_a_prompt)
        self._turn = 0

    def round(self, restoring: bool) -> tuple[list[float], int]:
        """The gaps of both sequences while prompts come back, and how many came."""
        found: list[list[float]] = []
        threads = [
            threading.Thread(target=lambda s=seed: found.append(gaps_of(self.engine, 1_000 + s))) for seed in (1, 2)
        ]
        for thread in threads:
            thread.start()
        asked = 0
        while any(thread.is_alive() for thread in threads):
            seed = self._turn % TURNS_TIER if restoring else TURNS_TIER + self._turn % TURNS_POOL
            self._turn += 1
            if not restoring:
                self.copier.copy(self.nbytes)
            self.engine.complete(prompt(seed), 1)
            if not restoring:
                self.copier.wait()
            asked += 1
            time.sleep(0.1)
        return [gap for gaps in found for gap in gaps], asked


@contextmanager
def engine_of(directory: Path, tokens_a_block: int = 128) -> Iterator[Engine]:
    blocks = (POOL_BLOCKS_SHARE * PROMPT_TOKENS + 2 * (DECODED + 64)) // tokens_a_block + 8
    transfer = {
        "kv_connector": "NvmeOffloadingConnector",
        "kv_connector_module_path": "lmcache_nvme_backend",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "NvmeOffloadingSpec",
            "spec_module_path": "lmcache_nvme_backend",
            "root_dir": str(directory),
            "quota_gib": 4,
            "staging_mib": 64,
            "blocks_per_chunk": 2,
        },
    }
    spec = EngineSpec(
        model=find_model(None, lambda _: None),
        log=directory / "engine.log",
        max_model_len=6_000,
        max_num_batched_tokens=512,
        args=(
            "--kv-transfer-config", json.dumps(transfer), "--num-gpu-blocks-override", str(blocks),
            "--block-size", str(tokens_a_block),
        ),
        ready_timeout_s=900,
    )  # fmt: skip
    engine = Engine(spec)
    try:
        yield engine
    finally:
        engine.stop()


def others(subject: str, rounds: int, directory: Path, say: Any) -> list[Row]:
    """Milliseconds beside a restore by `subject`, and beside a copy of as many bytes."""
    with engine_of(directory) as engine:
        say("storing the prompts …")
        for seed in range(TURNS_TIER + TURNS_POOL):
            engine.complete(prompt(seed), 1)
        read = engine.metrics().value("kvtier_bytes_read_total")
        engine.complete(prompt(0), 1)
        time.sleep(1)
        nbytes = int(engine.metrics().value("kvtier_bytes_read_total") - read)
        if nbytes <= 0:
            raise RuntimeError("the prompt was still in the pool: nothing came back from the drive")
        bench = Others(engine, nbytes)
        gaps: dict[str, list[list[float]]] = {"restore": [], "memcpy": []}
        came: dict[str, int] = {"restore": 0, "memcpy": 0}
        for turn in range(rounds):
            for kind in ("restore", "memcpy") if turn % 2 else ("memcpy", "restore"):
                say(f"two sequences beside a {kind}, round {turn + 1} of {rounds} …")
                if kind == "memcpy":  # in the pool from here on
                    engine.complete(prompt(TURNS_TIER), 1)
                one, asked = bench.round(kind == "restore")
                gaps[kind].append(one)
                came[kind] += asked
        bench.copier.end()
        rows = []
        for kind, each in gaps.items():
            flat = [gap for one in each for gap in one]
            rows.append(
                Row(
                    subject=subject if kind == "restore" else "memcpy",
                    operation="gap p99 beside it",
                    size=nbytes,
                    value=percentile(flat, 99) * 1000,
                    unit="ms",
                    samples=[percentile(one, 99) * 1000 for one in each],
                    note=f"median {percentile(flat, 50) * 1000:.0f} ms, {came[kind]} prompts, {len(flat)} gaps",
                )
            )
        rows[0].peer_ratio = median(a / b for a, b in zip(rows[0].samples or [], rows[1].samples or []))
        return rows


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
