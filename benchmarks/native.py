"""vLLM's own offloading over NVMe (`NvmeOffloadingSpec`): its load at the drive's line, and what it costs others.

    python benchmarks/native.py [--directory DIR] [--gib 2] [--chunks 1,6] [--rounds 3] [--no-engine] [--json FILE]

*Rates*: this door's real worker stores and loads a context through vLLM's own interface, in a process of its own, as
`line_rate.py` does for LMCache's; fio moves as many bytes in the same directory in the same rounds.

*Others*: what a restore costs sequences that are being decoded meanwhile (`gaps.py`).
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from gaps import others
from machine import machine, resident_bytes, tool_version
from rates import MIB, Sample, measure, timed
from rich.console import Console
from rich.table import Table
from rows import Row, number, write_json

SUBJECT = "native-spec"
LAYERS, BLOCKS_PER_CHUNK, POOL_CHUNKS = 16, 8, 4
STAGING_MIB = 256


class NativeSubject:
    """One worker of the native door over blocks in memory: the context's chunks take turns in them."""

    def __init__(self, directory: Path, chunk_bytes: int, chunks: int) -> None:
        import torch

        from lmcache_nvme_backend.doors.native.copies import make_copier
        from lmcache_nvme_backend.doors.native.layout import GroupLayout, Piece
        from lmcache_nvme_backend.doors.native.worker import NvmeOffloadingWorker
        from lmcache_nvme_backend.staging import StagingMemory, StagingRing
        from lmcache_nvme_backend.store import ChunkStore, Namespace, StoreSettings

        torch.set_num_threads(1)
        page = chunk_bytes // LAYERS // BLOCKS_PER_CHUNK
        pieces = tuple(Piece(i, page, i * page * BLOCKS_PER_CHUNK) for i in range(LAYERS))
        layout = GroupLayout(pieces, BLOCKS_PER_CHUNK, page * LAYERS * BLOCKS_PER_CHUNK)
        self._half = POOL_CHUNKS * BLOCKS_PER_CHUNK
        generator = torch.Generator().manual_seed(0)
        shape = (2 * self._half, page)
        self.memory = [torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator) for _ in range(LAYERS)]
        self._before_opening = resident_bytes()
        self.chunks, self._round = chunks, 0
        store = ChunkStore.open(directory, Namespace({"benchmark": "native"}), StoreSettings(1 << 50))
        ring = StagingRing(StagingMemory(STAGING_MIB * MIB), layout.nbytes)
        self.worker = NvmeOffloadingWorker(
            store, ring, make_copier(self.memory), [layout], [256], 4, 0.25, lambda: None
        )

    def _keys(self) -> list[Any]:
        from lmcache_nvme_backend.store import digest_fields

        return [digest_fields(self._round, i) for i in range(self.chunks)]

    def _blocks(self, first: int) -> Any:
        from vllm.v1.kv_offload.base import GPULoadStoreSpec

        ids = [first + i % self._half for i in range(self.chunks * BLOCKS_PER_CHUNK)]
        return GPULoadStoreSpec(ids, group_sizes=[len(ids)], block_indices=[0])

    def _finish(self) -> None:
        done: list[Any] = []
        while not done:
            self.worker.await_any(1.0)
            done = self.worker.get_finished()
        if not done[0].success:
            raise RuntimeError(f"a transfer failed: {self.worker.values()}")

    def store(self) -> Sample:
        from lmcache_nvme_backend.doors.hybrid_prefix import Place
        from lmcache_nvme_backend.doors.native.transfers import NvmeStoreSpec

        self._round += 1
        keys = self._keys()
        places = [Place(key, i, keys[i - 1] if i else None) for i, key in enumerate(keys)]

        def store() -> None:
            self.worker.submit_store(self._round, self._blocks(0), NvmeStoreSpec(places, [len(places)]))
            self._finish()
            self.worker.stores.wait_for_writes(600)

        sample = timed(store, self._before_opening)
        if self.worker.store.match(keys) != len(keys):
            raise RuntimeError(f"not every chunk was stored: {self.worker.stores.dropped.snapshot()}")
        return sample

    def load(self) -> Sample:
        import torch

        from lmcache_nvme_backend.doors.native.transfers import NvmeLoadSpec

        keys = self._keys()
        for tensor in self.memory:
            tensor[self._half :] = 0

        def load() -> None:
            self.worker.submit_load(-self._round, NvmeLoadSpec(keys, keys), self._blocks(self._half))
            self._finish()

        sample = timed(load, self._before_opening)
        n = min(self._half, self.chunks * BLOCKS_PER_CHUNK)
        if not all(torch.equal(t[:n], t[self._half :][:n]) for t in self.memory):
            raise RuntimeError("other bytes came back than were stored")
        return sample


def main(
    directory: Annotated[Path | None, typer.Option(help="On the drive to measure; default: the home folder.")] = None,
    gib: Annotated[float, typer.Option(min=0.05, help="Size of the context.")] = 2,
    chunks: Annotated[str, typer.Option(help="Chunk sizes in MiB.")] = "1,6",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    engine: Annotated[bool, typer.Option(help="What a restore costs others, in a real engine.")] = True,
    rate: Annotated[bool, typer.Option(help="Loads and stores beside fio.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """The native door at the drive's line, and beside sequences that are being decoded."""
    console = Console(width=max(112, Console().width))
    say = partial(console.print, style="dim")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="native-", dir=directory or Path.home()) as folder:
        for size in chunks.split(",") if rate else ():
            rows += measure(int(size), gib, rounds, Path(folder), {SUBJECT: NativeSubject}, say)
        if engine:
            (Path(folder) / "engine").mkdir()
            rows += others(SUBJECT, rounds, Path(folder) / "engine", say)
        facts = machine(Path(folder))
    facts["fio"] = tool_version("fio")
    table = Table(title=f"NvmeOffloadingSpec: a context of {gib:g} GiB, {rounds} alternating rounds, medians")
    for column in ("size", "operation", "subject", "value", "of fio", "of memcpy", "held MiB", "CPU s/GB"):
        table.add_column(column, justify="left" if column in ("operation", "subject") else "right")
    for row in rows:
        table.add_row(
            f"{row.size / MIB:.0f} MiB", row.operation, row.subject + (f" ({row.note})" if row.note else ""),
            f"{row.value:.2f} {row.unit}", number(row.share_of_fio), number(row.peer_ratio),
            number(row.resident_mib, ".0f"), number(row.cpu_s_per_gb),
        )  # fmt: skip
    console.print(table)
    if json_file is not None:
        write_json(json_file, rows, facts, gib=gib, rounds=rounds, staging_mib=STAGING_MIB)


if __name__ == "__main__":
    typer.run(main)
