"""Everything at once; `make faults` does it for a minute each."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_nvme_backend.store import ChunkStore, StoreSettings
from lmcache_nvme_backend.store.format import parse_name
from tests.faults.stress import SEED, SWITCH_INTERVAL_S, Tally
from tests.faults.support.record import Record
from tests.faults.support.verify import verify
from tests.faults.support.workload import NAMESPACES, PREFIXES, QUOTA, Workload, chunk_files
from tests.unit.store.store_helpers import disk_bytes, temporaries

PROJECT = Path(__file__).parents[2]
RAM = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def test_threads_and_processes_that_do_everything_at_once_never_see_wrong_bytes(tmp_path):
    """Nor an error, a leak, a lost pin or a disk above the quota; also while stores are closed under their threads."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.faults.stress", "--seconds", "10", "--json", "--directory", str(tmp_path)],
        cwd=PROJECT, env={**os.environ, "PYTHONPATH": str(PROJECT)}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    figures = json.loads(run.stdout)
    assert [figures[name] for name in ("wrong", "corrupt", "io_errors", "over_quota", "errors")] == [0] * 5
    assert figures["hits"] > 100 and figures["evictions"] > 100 and figures["looks"] > 10
    assert figures["lives"] > 4 and figures["refused_by_close"] > 0


OPERATIONS = st.tuples(st.sampled_from(["store", "store", "load", "remove", "clear"]), st.sampled_from(PREFIXES[:9]))
PROGRAMS = st.lists(st.lists(OPERATIONS, min_size=1, max_size=15), min_size=2, max_size=5)


def do(workload, store, operation, keys):
    match operation:
        case "store":
            workload._store_prefix(keys)
        case "load":
            workload._load_prefix(keys)  # pinned, compared, unpinned
        case "remove":
            store.remove(keys[-1])
        case "clear":
            store.clear()


def run_together(root, programs, codec, closes):
    """Each program in a thread of its own, all begun at once, and a close in the middle where wanted."""
    store = ChunkStore.open(root, NAMESPACES[0], StoreSettings(quota_bytes=QUOTA, codec=codec))
    tally, errors = Tally(), []
    barrier = threading.Barrier(len(programs) + 1)

    def work(program):
        try:
            workload = Workload(SEED, 0, store, tally, random.Random(0))
            barrier.wait()
            for operation, keys in program:
                do(workload, store, operation, keys)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(program,)) for program in programs]
    for thread in threads:
        thread.start()
    barrier.wait()
    if closes:
        store.close()
    for thread in threads:
        thread.join()
    assert errors == [] and tally["wrong"] == 0 and not store._index._pins
    if not closes:
        usage = store.usage()
        assert (usage.used_bytes, usage.reserved_bytes) == (disk_bytes(root), 0) and usage.used_bytes <= QUOTA
        assert {parse_name(path.name)[0] for path in chunk_files(root)} == set(store._index.all_keys())
        assert temporaries(root) == []
        store.close()
    verify(root, SEED, Record())


def any_programs(examples):
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(programs=PROGRAMS, codec=st.sampled_from(["none", "zstd"]), closes=st.booleans())
    def check(programs, codec, closes):
        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            with tempfile.TemporaryDirectory(dir=RAM) as directory:
                run_together(Path(directory), programs, codec, closes)
        finally:
            sys.setswitchinterval(interval)

    check()


def test_any_operations_in_threads_leave_what_the_model_allows():
    """Whatever each thread does to which prefix: a load has its key's bytes, and in the end index, account and disk say
    the same, within the quota, with no pin and no temporary, and a fresh store finds all of it."""
    any_programs(50)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_any_operations_in_threads_for_a_minute_and_more():
    """The same, at length."""
    any_programs(1000)
