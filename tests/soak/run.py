"""The soak itself: one engine under faults, then one without any that says what was right."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import yaml

from kvtier.engine import Engine, EngineSpec
from tests.soak.comparison import Answers, Chunks, compare_answers, compare_chunks
from tests.soak.faults import Faults
from tests.soak.mount import small_disk
from tests.soak.resources import Resources
from tests.soak.sessions import Sessions

EXAMPLE = Path(__file__).parents[2] / "configs/examples/lmcache-nvme.yaml"
DISK_MIB, QUOTA_MIB = 320, 256
# 140 blocks of 32 tokens are less than four histories, so that most of each comes from the tier.
SMALL_POOL = ("--num-gpu-blocks-override", "140")
ARGUMENTS = ("--dtype", "float32", "--block-size", "32", "--max-num-seqs", "4")
# An engine without any tier grew by 472 MiB in its first 497 requests, ever more slowly; so this bound is loose, and
# finds a tier that keeps most of what it moves, which is over a GiB in a long run. What the tier could lose bit by bit
# is counted instead: slots, descriptors, threads.
MOST_MEMORY_MIB = 640
# The engine's own come and go: connections, and pools of threads that start when they are first needed.
MOST_DESCRIPTORS, MOST_THREADS = 24, 16


class Report(msgspec.Struct, frozen=True):
    """What came of it. Growth is that of all of the engine's processes from the end of the warm-up on; that of memory
    is resident memory in each third of the time after it."""

    seconds: float
    mounted: bool  # whether there was a disk of its own, to be filled and made read-only
    requests: int
    failures: list[str]
    faults: dict[str, int]
    answers: Answers
    chunks: Chunks
    tokens_from_tier: int
    chunks_corrupt: int
    chunks_load_failed: int
    moved_mib: float  # what the tier read and wrote
    memory_growth_mib: list[float]
    descriptors_growth: float
    threads_growth: float
    slots_missing: int  # staging slots that were free before and are not afterwards

    def leaks(self) -> list[str]:
        """What grew by more than an engine's own."""
        found = []
        if (grown := sum(self.memory_growth_mib)) > MOST_MEMORY_MIB:
            found.append(f"memory grew by {grown:.0f} MiB, more than {MOST_MEMORY_MIB}")
        if self.descriptors_growth > MOST_DESCRIPTORS:
            found.append(f"{self.descriptors_growth:.0f} descriptors more")
        if self.threads_growth > MOST_THREADS:
            found.append(f"{self.threads_growth:.0f} threads more")
        if self.slots_missing:
            found.append(f"{self.slots_missing} staging slots are missing")
        return found


def soak(folder: Path, model: Path, seconds: float, seed: int = 1) -> Report:
    """Run the engine under faults for ``seconds``, then compare. ``folder`` is empty and on a disk."""
    with small_disk(folder, DISK_MIB) as disk:
        root = (disk.path if disk is not None else folder) / "kv"
        root.mkdir()
        with _engine(folder / "soaked", model, root, SMALL_POOL) as engine:
            slots = engine.metrics().value("kvtier_staging_slots_free")
            with Resources(engine.process.processes) as resources, Faults(root, disk, seed) as faults:
                sessions = Sessions(engine, seconds, seed)
                sessions.run()
            time.sleep(2.0)  # metrics are exported four times a second
            metrics = engine.metrics()
        right = folder / "right"
        right.mkdir()
        with _engine(folder / "reference", model, right, ("--num-gpu-blocks-override", "30000")) as reference:
            answers = compare_answers(reference, sessions.turns)
            loaded = reference.metrics().value("kvtier_chunks_loaded_total")
            assert loaded <= 1, "the reference must compute everything itself; only its self-test reads"
        chunks = compare_chunks(root, right)
    return Report(
        seconds=seconds,
        mounted=disk is not None,
        requests=len(sessions.turns) + len(sessions.failures),
        failures=sessions.failures,
        faults=dict(faults.done),
        answers=answers,
        chunks=chunks,
        tokens_from_tier=int(metrics.value("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")),
        chunks_corrupt=int(metrics.value("kvtier_chunks_corrupt_total")),
        chunks_load_failed=int(metrics.value("kvtier_chunks_load_failed_total")),
        moved_mib=(metrics.value("kvtier_bytes_read_total") + metrics.value("kvtier_bytes_written_total")) / 2**20,
        memory_growth_mib=[grown / 2**20 for grown in resources.growth("memory", 3)],
        descriptors_growth=resources.growth("descriptors")[0],
        threads_growth=resources.growth("threads")[0],
        slots_missing=int(slots - metrics.value("kvtier_staging_slots_free")),
    )


@contextmanager
def _engine(folder: Path, model: Path, root: Path, pool: tuple[str, ...]) -> Iterator[Engine]:
    folder.mkdir()
    config = yaml.safe_load(EXAMPLE.read_text())
    # The reference keeps everything; the quota of the other is what makes it evict.
    quota_gib = QUOTA_MIB / 1024 if pool is SMALL_POOL else 64
    config["extra_config"] |= {"nvme.path": str(root), "nvme.quota_gib": quota_gib, "nvme.staging_mib": 16}
    (folder / "lmcache.yaml").write_text(yaml.safe_dump(config))
    spec = EngineSpec(
        model=model,
        log=folder / "engine.log",
        lmcache_config=folder / "lmcache.yaml",
        args=(*ARGUMENTS, *pool),
        env={"VLLM_SERVER_DEV_MODE": "1"},
        max_model_len=4096,
        max_num_batched_tokens=1024,
        kv_pool_gib=4,
    )
    with Engine(spec) as engine:
        yield engine


def as_json(report: Report) -> str:
    return json.dumps(msgspec.to_builtins(report), indent=1)
