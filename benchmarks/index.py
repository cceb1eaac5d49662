"""A million chunks: from opening the store to the first lookup, the memory of an entry, and the time of a lookup.

    python benchmarks/index.py [--chunks 1000000] [--directory DIR] [--rounds 3] [--json FILE]

The files are empty ones with a chunk's name: opening reads names (and the snapshot), never content. Every open is in a
process of its own, once from the listing alone and once with the snapshot of a store that closed; the kernel's caches
of names are dropped before each where that is ours. Lookups are of a 512-chunk prefix, all of it present: `match`
of the store, and `batched_contains` of the real `NvmeBackend` with LMCache's keys, pinning as a lookup does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from machine import machine, resident_bytes
from rich.console import Console
from rich.table import Table
from rows import Row, number, write_json

from lmcache_nvme_backend.store import ChunkKey, ChunkStore, Namespace, StoreSettings, digest_fields, snapshot
from lmcache_nvme_backend.store.format import chunk_name
from lmcache_nvme_backend.store.layout import Layout

BLOCKS = 1537  # of a 6 MiB chunk
PREFIX = 512
LOOKUPS = 200
NAMESPACE = Namespace({"benchmark": "index"})
# Usable within, bytes an entry, a lookup within: what the project set out to reach.
GOALS = {
    ("open, listing", "s"): 3.0,
    ("open, snapshot", "s"): 1.0,
    ("memory", "bytes/entry"): 300.0,
    ("match", "us"): 300.0,
    ("batched_contains", "us"): 300.0,
}


def key_of(number: int) -> ChunkKey:
    return digest_fields("index", number)


def settings() -> StoreSettings:
    return StoreSettings(quota_bytes=1 << 60)


def fill(root: Path, chunks: int) -> None:
    """`chunks` names, in prefixes of `PREFIX`, and the account that goes with them."""
    with ChunkStore.open(root, NAMESPACE, settings()):
        pass
    layout = Layout(str(root))
    for shard in range(256):
        Path(layout.namespace(NAMESPACE.digest), f"{shard:02x}").mkdir(mode=0o700)
    for i in range(chunks):
        key = key_of(i)
        os.close(os.open(f"{layout.shard(NAMESPACE.digest, key)}/{chunk_name(key, i % PREFIX, BLOCKS)}", os.O_CREAT))


def drop_name_caches() -> bool:
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def child(root: Path, chunks: int) -> dict[str, float]:
    """One process: open, look up once, measure, close (which leaves a snapshot)."""
    prefix = [key_of(i) for i in range(PREFIX)]
    before = resident_bytes()
    begin = time.perf_counter()
    store = ChunkStore.open(root, NAMESPACE, settings())
    found = store.match(prefix)
    usable = time.perf_counter() - begin
    if found != min(PREFIX, chunks):
        raise RuntimeError(f"{found} chunks of a prefix of {PREFIX} were found")
    memory = (resident_bytes() - before) / chunks
    while store._census.unlisted or store._upkeep is None or not store._upkeep._ranked:
        time.sleep(0.01)
    ranked = time.perf_counter() - begin
    lookups = [timed(lambda: store.match(prefix)) for _ in range(LOOKUPS)]
    if len(store._index) != chunks:
        raise RuntimeError(f"{len(store._index)} of {chunks} chunks are in the index")
    closing = timed(store.close)
    return {"usable": usable, "memory": memory, "settled": ranked, "match": median(lookups) * 1e6, "close": closing}


def backend_lookup(root: Path) -> dict[str, list[float]]:
    """Microseconds of `batched_contains` of a 512-chunk prefix through the real backend: with keys that it has seen
    before, as on a session's later turns, and with keys that are new to this process."""
    os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"
    import torch
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata

    from lmcache_nvme_backend import NvmeBackend
    from lmcache_nvme_backend.doors.chunk_names import ChunkNames

    extra = {"nvme.path": str(root), "nvme.quota_gib": 1, "nvme.staging_mib": 8, "nvme.model_fingerprint": "index"}
    extra["storage_plugin.nvme.module_path"] = "lmcache_nvme_backend"
    config = LMCacheEngineConfig.from_dict(
        {"chunk_size": 256, "local_cpu": False, "max_local_cpu_size": 0, "storage_plugins": ["nvme"],
         "pre_caching_hash_algorithm": "sha256_cbor", "extra_config": extra}
    )  # fmt: skip
    metadata = LMCacheMetadata(
        model_name="index", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0, kv_dtype=torch.bfloat16,
        kv_shape=(1, 2, 256, 1, 16), role="worker", chunk_size=256,
    )  # fmt: skip
    backend = NvmeBackend(config=config, metadata=metadata)
    backend._streams = True  # as after LMCache's engine is complete: a lookup is not cut to what the ring holds
    keys = [CacheEngineKey("index", 1, 0, i, torch.bfloat16) for i in range(PREFIX)]
    payload = memoryview(bytearray(4096))
    for i, digest in enumerate(backend._names.of_prefix(keys)):
        backend.store.put(digest, payload, depth=i, tokens=256)
    taken: dict[str, list[float]] = {"batched_contains": [], "batched_contains, new keys": []}
    for i in range(2 * LOOKUPS):
        operation = "batched_contains" if i < LOOKUPS else "batched_contains, new keys"
        if i >= LOOKUPS:
            backend._names = ChunkNames(scoped=False)
        fresh = [CacheEngineKey("index", 1, 0, i, torch.bfloat16) for i in range(PREFIX)]
        begin = time.perf_counter()
        found = backend.batched_contains(fresh, pin=True)
        taken[operation].append((time.perf_counter() - begin) * 1e6)
        if found != PREFIX:
            raise RuntimeError(f"{found} of {PREFIX} chunks were found")
        for key in fresh:
            backend.unpin(key)
    backend.close()
    return taken


def in_process(*arguments: object) -> Any:
    command = [sys.executable, __file__, "--child", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(chunks: int, rounds: int, root: Path, say: Callable[[str], None]) -> tuple[list[Row], bool]:
    say(f"naming {chunks:,} files …")
    fill(root, chunks)
    file = Path(Layout(str(root)).namespace(NAMESPACE.digest)) / snapshot.FILE
    figures: dict[tuple[str, str], list[float]] = {}
    dropped = False
    for i in range(rounds):
        for how in ("listing", "snapshot"):
            if how == "listing":
                file.unlink(missing_ok=True)
            say(f"round {i + 1} of {rounds}, {how} …")
            dropped = drop_name_caches()
            found = in_process(root, chunks)
            for name, unit in (("usable", "s"), ("settled", "s"), ("memory", "bytes/entry"), ("match", "us")):
                operation = {"usable": f"open, {how}", "settled": f"order known, {how}"}.get(name, name)
                figures.setdefault((operation, unit), []).append(found[name])
            figures.setdefault(("close with a snapshot", "s"), []).append(found["close"])
    shutil.rmtree(root)
    root.mkdir()
    say("looking up through the backend …")
    figures |= {(name, "us"): samples for name, samples in in_process(root, 0).items()}
    rows = []
    for (operation, unit), samples in figures.items():
        size = PREFIX if unit == "us" else chunks
        shown = samples if len(samples) <= 2 * rounds else None
        rows.append(Row("nvme-backend", operation, size, median(samples), unit, samples=shown))
    return rows, dropped


def main(
    chunks: Annotated[int, typer.Option(min=PREFIX)] = 1_000_000,
    directory: Annotated[Path | None, typer.Option(help="On the drive to measure; default: the home folder.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """How long a store of a million chunks takes to open, what it holds, and how fast it answers."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="index-", dir=directory or Path.home()) as folder:
        root = Path(folder) / "root"
        root.mkdir()
        rows, dropped = measure(chunks, rounds, root, lambda text: console.print(text, style="dim"))
        facts = machine(Path(folder))
    caches = "caches of names dropped before each open" if dropped else "caches of names warm: dropping them needs root"
    table = Table(title=f"{chunks:,} chunks, medians of {rounds} rounds; {caches}")
    for column in ("what", "value", "unit", "to reach"):
        table.add_column(column, justify="right" if column in ("value", "to reach") else "left")
    for row in rows:
        goal = GOALS.get((row.operation, row.unit))
        table.add_row(row.operation, number(row.value), row.unit, number(goal, "g"))
    console.print(table)
    if json_file is not None:
        write_json(json_file, rows, facts, caches_dropped=dropped)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        place, count = Path(sys.argv[2]), int(sys.argv[3])
        print(json.dumps(child(place, count) if count else backend_lookup(place)), flush=True)
    else:
        typer.run(main)
