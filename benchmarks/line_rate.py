"""A long context through the tier and back, beside fio and LMCache's own disk backends, in one run.

    python benchmarks/line_rate.py [--directory DIR] [--gib 4] [--chunks 1,6,8,18] [--rounds 3] [--json FILE]

Every subject but fio is a real `LMCacheEngine` with that one storage backend, in a process of its own; its `store` and
`retrieve` are what is timed, with the connector's copy from and to a paged KV, until the last byte is on the disk.
All of them bypass the page cache. How rounds, fio and shares work: `rates.py`.
"""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from machine import machine, resident_bytes, tool_version
from rates import GIB, MIB, Sample, measure, timed
from rich.console import Console
from rich.table import Table
from rows import number, write_json

LAYERS, HEADS, BLOCK_TOKENS, CHUNK_TOKENS = 4, 8, 32, 256
# Chunks' worth of KV in memory: the context's chunks take turns in it, so that a 4 GiB context needs no 4 GiB of KV.
POOL_CHUNKS = 5
SUBJECTS = ("nvme-backend", "lmcache-local-disk", "lmcache-fs")
STAGING_MIB = 256
NO_QUOTA_GIB = 1 << 20


def lmcache_config(subject: str, directory: Path, nbytes: int) -> dict[str, Any]:
    """Each backend as its documentation has it, with O_DIRECT. LMCache's own need a CPU pool for a whole context.

    No quota is in the way: the files of a round are deleted behind the backends, which go on counting them.
    """
    top: dict[str, Any] = {
        "chunk_size": CHUNK_TOKENS,
        "local_cpu": False,
        "pre_caching_hash_algorithm": "sha256_cbor",
        "blocking_timeout_secs": 600,
    }
    if subject == "nvme-backend":
        return top | {
            "max_local_cpu_size": 0,
            "storage_plugins": ["nvme"],
            "extra_config": {
                "storage_plugin.nvme.module_path": "lmcache_nvme_backend",
                "storage_plugin.nvme.class_name": "NvmeBackend",
                "nvme.path": str(directory),
                "nvme.quota_gib": NO_QUOTA_GIB,
                "nvme.staging_mib": STAGING_MIB,
                "nvme.model_fingerprint": "line-rate",
                # One call stores the whole context here, not one step of it: nothing may be dropped for being late.
                "nvme.store_wait_ms": 600_000,
            },
        }
    top["max_local_cpu_size"] = nbytes / GIB + 0.5
    if subject == "lmcache-local-disk":
        return top | {
            "local_disk": f"{directory}/",
            "max_local_disk_size": NO_QUOTA_GIB,
            "extra_config": {"use_odirect": True},
        }
    return top | {
        "remote_url": f"fs://localhost:0{directory}/",
        "remote_serde": "naive",
        "extra_config": {"fs_connector_use_odirect": True, "save_chunk_meta": False},
    }


class Context:
    """A paged KV with a source and a target, and the slot mapping of a context that passes through it."""

    def __init__(self, chunk_bytes: int, chunks: int) -> None:
        import torch

        hidden = chunk_bytes // (2 * LAYERS * CHUNK_TOKENS * 2)
        head = hidden // HEADS
        if 2 * LAYERS * CHUNK_TOKENS * HEADS * head * 2 != chunk_bytes:
            raise typer.BadParameter(f"a chunk of {chunk_bytes} bytes is no whole number of heads")
        self.kv_shape = (LAYERS, 2, CHUNK_TOKENS, HEADS, head)
        self.tokens = chunks * CHUNK_TOKENS
        self._pool_blocks = POOL_CHUNKS * CHUNK_TOKENS // BLOCK_TOKENS
        shape = (2 * self._pool_blocks, HEADS, BLOCK_TOKENS, 2 * head)
        generator = torch.Generator().manual_seed(0)
        self.layers = [
            torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator).view(torch.bfloat16)
            for _ in range(LAYERS)
        ]
        pool_tokens = POOL_CHUNKS * CHUNK_TOKENS
        within = torch.arange(self.tokens) % pool_tokens
        self.source, self.target = within, within + pool_tokens

    def clear_target(self) -> None:
        for layer in self.layers:
            layer[self._pool_blocks :] = 0

    def arrived(self) -> bool:
        """Whether the last turn of the context in the target is the source, bit for bit."""
        import torch

        n = min(self._pool_blocks, self.tokens // BLOCK_TOKENS)
        return all(
            torch.equal(layer[:n].view(torch.int16), layer[self._pool_blocks :][:n].view(torch.int16))
            for layer in self.layers
        )


class LmcacheSubject:
    """One LMCacheEngine with one storage backend."""

    def __init__(self, subject: str, directory: Path, chunk_bytes: int, chunks: int) -> None:
        os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"
        os.environ.setdefault("PYTHONHASHSEED", "0")
        import torch
        from lmcache.v1.cache_engine import LMCacheEngineBuilder
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata

        from lmcache_nvme_backend.doors import lmcache_compat
        from lmcache_nvme_backend.doors.cpu_connector import CpuBlockConnector

        torch.set_num_threads(1)  # the connector's copy is one thread's, as in an engine's worker
        self.context = Context(chunk_bytes, chunks)
        self._before_opening = resident_bytes()
        metadata = LMCacheMetadata(
            model_name="line-rate", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.bfloat16, kv_shape=self.context.kv_shape, role="worker", chunk_size=CHUNK_TOKENS,
        )  # fmt: skip
        if subject == "nvme-backend":
            lmcache_compat.apply_all(with_vllm=False)
        config = LMCacheEngineConfig.from_dict(lmcache_config(subject, directory, chunk_bytes * chunks))
        self.engine: Any = LMCacheEngineBuilder.get_or_create(
            subject, config, metadata, CpuBlockConnector(metadata), lambda t, src: t, lambda o, src: o
        )
        self.engine.post_init()
        backends = self.engine.storage_manager.storage_backends
        self.backend = next(b for name, b in backends.items() if name != "LocalCPUBackend")
        self._round = 0
        self._prompt: list[int] = []

    def store(self) -> Sample:
        """A context nobody has seen, until the last chunk is on the disk."""
        self._round += 1
        self._prompt = [(self._round << 24) + i for i in range(self.context.tokens)]
        keys = [key for _, _, key in self.engine.token_database.process_tokens(self._prompt)]
        kv = {"kvcaches": self.context.layers, "slot_mapping": self.context.source, "offset": 0}

        def store() -> None:
            self.engine.store(self._prompt, req_id=f"s{self._round}", **kv)
            self._settle(keys)

        sample = timed(store, self._before_opening)
        if not all(self.backend.contains(key) for key in keys):
            dropped = getattr(self.backend, "saver", None) and self.backend.saver.dropped.snapshot()
            raise RuntimeError(f"not every chunk was stored; dropped: {dropped}")
        return sample

    def _settle(self, keys: list[Any]) -> None:
        for key in keys:
            while self.backend.exists_in_put_tasks(key):
                time.sleep(0.0005)

    def load(self) -> Sample:
        """The context just stored, into other blocks: what a worker does for a hit."""
        import torch

        self.context.clear_target()
        request = f"l{self._round}"
        kv = {"kvcaches": self.context.layers, "slot_mapping": self.context.target, "vllm_cached_tokens": 0}
        mask = torch.ones(len(self._prompt), dtype=torch.bool)
        loaded = []

        def load() -> None:
            loaded.append(int(self.engine.retrieve(self._prompt, mask, req_id=request, **kv).sum()))

        found = self.engine.lookup(self._prompt, lookup_id=request, pin=True)
        sample = timed(load, self._before_opening)
        self.engine.lookup_unpin(request)
        if found != len(self._prompt) or loaded != [found] or not self.context.arrived():
            raise RuntimeError(f"looked up {found}, loaded {loaded} of {len(self._prompt)} tokens, or other bytes came")
        return sample

    def close(self) -> None:
        from lmcache.v1.cache_engine import LMCacheEngineBuilder

        LMCacheEngineBuilder.destroy(self.engine.config.lmcache_instance_id)


def main(
    directory: Annotated[Path | None, typer.Option(help="On the drive to measure; default: the home folder.")] = None,
    gib: Annotated[float, typer.Option(min=0.05, help="Size of the context.")] = 4,
    chunks: Annotated[str, typer.Option(help="Chunk sizes in MiB.")] = "1,6,8,18",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    peers: Annotated[bool, typer.Option(help="LMCache's own backends, too.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Load and store at the drive's own line, beside its line and LMCache's own backends."""
    console = Console(width=max(112, Console().width))
    names = SUBJECTS if peers else SUBJECTS[:1]
    subjects = {name: partial(LmcacheSubject, name) for name in names}
    say = partial(console.print, style="dim")
    with tempfile.TemporaryDirectory(prefix="line-rate-", dir=directory or Path.home()) as folder:
        rows = [
            row for size in chunks.split(",") for row in measure(int(size), gib, rounds, Path(folder), subjects, say)
        ]
        facts = machine(Path(folder))
    facts["fio"] = tool_version("fio")
    table = Table(title=f"A context of {gib:g} GiB, {rounds} alternating rounds, medians; staging {STAGING_MIB} MiB")
    columns = ("chunk", "operation", "subject", "GB/s", "of fio", "of best peer", "growth MiB", "held MiB", "CPU s/GB")
    for column in columns:
        table.add_column(column, justify="left" if column in ("operation", "subject") else "right")
    for before, row in zip([None, *rows], rows):
        if before is not None and (before.size, before.operation) != (row.size, row.operation):
            table.add_section()
        table.add_row(
            f"{row.size // MIB} MiB", row.operation, row.subject + (f" ({row.note})" if row.note else ""),
            number(row.value), number(row.share_of_fio), number(row.peer_ratio), number(row.rss_growth_mib, ".0f"),
            number(row.resident_mib, ".0f"), number(row.cpu_s_per_gb),
        )  # fmt: skip
    console.print(table)
    if facts["fio"] is None:
        console.print("fio is not installed: no line to compare with (apt-get install fio).")
    if json_file is not None:
        write_json(json_file, rows, facts, gib=gib, rounds=rounds, staging_mib=STAGING_MIB)


if __name__ == "__main__":
    typer.run(main)
