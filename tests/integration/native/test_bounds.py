"""Transfers under pressure: what vLLM waits for is bounded, every slot comes back, and nothing is half stored."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from lmcache_nvme_backend.doors.hybrid_prefix import Place
from lmcache_nvme_backend.doors.native.copies import CpuCopier
from lmcache_nvme_backend.doors.native.layout import (
    BlockRun,
    ChunkBlocks,
    GroupLayout,
    Piece,
    chunks_of,
    stored_chunks_of,
)
from lmcache_nvme_backend.doors.native.loads import ChunkLoads
from lmcache_nvme_backend.doors.native.stores import ChunkStores
from lmcache_nvme_backend.staging import Slot, StagingMemory, StagingRing
from lmcache_nvme_backend.store import ChunkKey, ChunkStore, Namespace, StoreSettings, digest_fields

PAGE = 8192
BLOCKS = 64
LAYOUT = GroupLayout((Piece(0, PAGE, 0), Piece(1, PAGE, 2 * PAGE)), 2, 4 * PAGE)


class Bench:
    """Two tensors of blocks, a ring and a store, with the transfers between them."""

    def __init__(self, root: Path, quota: int = 64 << 20) -> None:
        self.memory = [torch.randint(-128, 127, (BLOCKS, PAGE), dtype=torch.int8) for _ in range(2)]
        self.ring = StagingRing(StagingMemory(8 * LAYOUT.nbytes), LAYOUT.nbytes)
        self.store = ChunkStore.open(root, Namespace({"test": "native"}), StoreSettings(quota))
        self.changed = threading.Condition()
        copier = CpuCopier(self.memory)
        self.stores = ChunkStores(self.store, self.ring, copier, [LAYOUT], [32], 2, self.changed)
        self.loads = ChunkLoads(self.store, self.ring, copier, [LAYOUT], 2, self.changed)

    def places(self, count: int, name: str = "p") -> list[Place]:
        keys = [digest_fields(name, i) for i in range(count)]
        return [Place(key, i, keys[i - 1] if i else None) for i, key in enumerate(keys)]

    def chunks(self, count: int, first: int = 0) -> list[ChunkBlocks]:
        return [ChunkBlocks(0, (BlockRun(0, first + 2 * i, 2),), True) for i in range(count)]

    def take_all_slots(self) -> list[Slot]:
        """As writes to a drive that hangs would."""
        return [slot for _ in range(self.ring.slots) if (slot := self.ring.acquire()) is not None]

    def store_now(self, places: list[Place]) -> None:
        self.stores.submit(99, places, self.chunks(len(places)), None)
        self.stores.wait({99}, 10)
        assert self.stores.wait_for_writes(10)
        self.stores.finished()

    def load_now(self, keys: list[ChunkKey], first: int) -> Any:
        self.loads.submit(2, keys, self.chunks(len(keys), first), None)
        self.loads.wait({2}, 10)
        return self.loads.finished()[0]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    one = Bench(tmp_path)
    yield one
    one.loads.close()
    one.stores.close(1)
    one.store.close()


def test_blocks_come_back_as_they_were(bench: Bench) -> None:
    """Two tensors, two blocks a chunk, blocks that lie in a row and blocks that do not."""
    places = bench.places(3)
    scattered = [ChunkBlocks(0, (BlockRun(0, 9, 1), BlockRun(1, 3, 1)), True), *bench.chunks(2)]
    bench.stores.submit(1, places, scattered, None)
    bench.stores.wait({1}, 10)
    assert bench.stores.wait_for_writes(10)
    before = [m.clone() for m in bench.memory]
    assert bench.load_now([p.key for p in places], 40).success
    for memory, old in zip(bench.memory, before):
        assert torch.equal(memory[40:46], old[[9, 3, 0, 1, 2, 3]])
        assert torch.equal(memory[:40], old[:40])
        assert torch.equal(memory[46:], old[46:])


def test_vllm_waits_a_bounded_time_for_blocks_whose_store_finds_no_slot(bench: Bench) -> None:
    """The chunks are lost, the blocks are free, and nothing reads them afterwards."""
    taken = bench.take_all_slots()
    bench.stores.submit(1, bench.places(4), bench.chunks(4), None)
    bench.stores.submit(2, bench.places(4, "q"), bench.chunks(4, 8), None)
    began = time.monotonic()
    bench.stores.wait({1, 2}, 0.2)
    assert time.monotonic() - began < 3
    assert [job.job_id for job in bench.stores.finished()] == [1, 2]
    for slot in taken:
        bench.ring.release(slot)
    assert bench.stores.wait_for_writes(10)
    assert len(list(Path(bench.store.directory).glob("*/*.kv"))) == 0
    assert bench.stores.dropped.snapshot() == {"gave up": 8}
    assert bench.ring.free == bench.ring.slots


def test_what_follows_a_lost_chunk_is_not_stored_until_it_is_there_again(bench: Bench) -> None:
    """A prefix without its head is of no use to anybody."""
    places = bench.places(4)
    partial = [*bench.chunks(1), ChunkBlocks(0, (BlockRun(1, 2, 1),), False), *bench.chunks(2, 4)]
    bench.stores.submit(1, places, partial, None)
    bench.stores.wait({1}, 10)
    assert bench.stores.wait_for_writes(10)
    assert [bench.store.contains(p.key) for p in places] == [True, False, False, False]
    assert bench.stores.dropped.snapshot() == {"partial": 1, "prefix lost": 2}
    bench.store_now(places)
    assert bench.store.match([p.key for p in places]) == 4


def test_a_load_that_was_given_up_never_writes_to_its_blocks_again(bench: Bench) -> None:
    """vLLM has given them to somebody else by then."""
    places = bench.places(2)
    bench.store_now(places)
    taken = bench.take_all_slots()
    bench.loads.submit(2, [p.key for p in places], bench.chunks(2, 40), None)
    bench.loads.wait({2}, 0.1)
    [job] = bench.loads.finished()
    assert not job.success
    before = [m.clone() for m in bench.memory]
    for slot in taken:
        bench.ring.release(slot)
    deadline = time.monotonic() + 10
    while bench.loads._pool._work_queue.qsize() and time.monotonic() < deadline:
        time.sleep(0.01)
    bench.loads._pool.shutdown(wait=True)
    assert all(torch.equal(m, old) for m, old in zip(bench.memory, before))
    assert bench.ring.free == bench.ring.slots


def test_loads_of_a_drive_that_hangs_fail_and_those_that_wait_for_their_turn_do_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job is given up where nothing moves at all."""
    places = bench.places(2)
    bench.store_now(places)
    taken = bench.take_all_slots()
    bench.loads.submit(2, [places[0].key], bench.chunks(1, 40), None)
    monkeypatch.setattr("lmcache_nvme_backend.doors.native.loads.STALL_S", 0.2)
    time.sleep(0.3)  # longer than that, and another one has moved since
    bench.loads._moved_at = time.monotonic()
    assert bench.loads.finished() == []
    time.sleep(0.3)
    [job] = bench.loads.finished()
    assert not job.success
    assert bench.loads.failed.snapshot() == {"stalled": 1}
    for slot in taken:
        bench.ring.release(slot)


def test_a_load_that_has_failed_does_not_wait_for_ever_for_a_read_that_hangs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that is missing fails at once; the job is over when the drive is given up for the other one."""
    places = bench.places(2)
    bench.store_now(places)
    gate, get = threading.Event(), bench.store.get

    def hangs(key: ChunkKey, into: memoryview) -> Any:
        if key == places[0].key:
            assert gate.wait(60)
        return get(key, into)

    monkeypatch.setattr(bench.store, "get", hangs)
    monkeypatch.setattr("lmcache_nvme_backend.doors.native.loads.STALL_S", 0.5)
    missing = digest_fields("missing")
    bench.loads.submit(2, [places[0].key, missing], bench.chunks(2, 40), None)
    deadline = time.monotonic() + 10
    while not (done := bench.loads.finished()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [job.success for job in done] == [False]
    assert missing in done[0].failed
    gate.set()
    bench.loads._pool.shutdown(wait=True)
    assert bench.ring.free == bench.ring.slots


def test_a_load_fails_as_a_whole_and_names_the_chunk(bench: Bench) -> None:
    """The others may have been written; vLLM takes all blocks back."""
    places = bench.places(5)
    bench.store_now(places)
    bench.store.remove(places[3].key)
    job = bench.load_now([p.key for p in places], 40)
    assert not job.success
    assert job.failed == {places[3].key}
    assert bench.ring.free == bench.ring.slots


def test_chunks_of_a_load_are_pinned_while_it_runs(tmp_path: Path) -> None:
    """A full disk does not take away what is being loaded."""
    bench = Bench(tmp_path, quota=10 * (LAYOUT.nbytes + 4096))
    places = bench.places(4)
    bench.store_now(places)
    taken = bench.take_all_slots()
    bench.loads.submit(2, [p.key for p in places], bench.chunks(4, 40), None)
    data = memoryview(bytearray(LAYOUT.nbytes))
    for i in range(40):
        bench.store.put(digest_fields("other", i), data, depth=0)
    for slot in taken:
        bench.ring.release(slot)
    bench.loads.wait({2}, 10)
    assert bench.loads.finished()[0].success
    bench.loads.close()
    bench.stores.close(1)
    bench.store.close()


def test_a_list_of_blocks_is_cut_where_chunks_end() -> None:
    """vLLM names the blocks of all groups in a row; the first and last chunk of a group may be there in part."""
    found = list(chunks_of([7, 8, 3, 4, 5, 9], [4, 0, 2], [1, 0, 2], 2))
    assert [(c.group, c.whole) for c in found] == [(0, False), (0, True), (0, False), (2, True)]
    assert found[0].runs == (BlockRun(1, 7, 1),)
    assert found[1].runs == (BlockRun(0, 8, 1), BlockRun(1, 3, 1))
    assert found[3].runs == (BlockRun(0, 5, 1), BlockRun(1, 9, 1))


def test_chunks_of_a_store_with_a_hole_are_none_of_them_whole() -> None:
    """vLLM takes a window's freed blocks out of the list: what follows has moved up, and would be another's bytes."""
    whole, one_missing = [10, 11, 12, 13, 20, 21, 22, 23], [10, 11, 13, 20, 21, 22, 23]
    found = list(stored_chunks_of([*whole, 5], [8, 1], [4, 0], [2, 1], 4))
    assert [(c.group, c.whole) for c in found] == [(0, True), (0, True), (1, False)]
    found = list(stored_chunks_of([*one_missing, 5, 6, 7, 8], [7, 4], [4, 0], [2, 1], 4))
    assert [(c.group, c.whole) for c in found] == [(0, False), (0, False), (1, True)]
    assert found[2].runs == (BlockRun(0, 5, 4),)
    found = list(stored_chunks_of(whole[2:], [6], [6], [2], 4))  # a head that has been left behind
    assert [(c.whole, c.runs) for c in found] == [(False, (BlockRun(2, 12, 2),)), (True, (BlockRun(0, 20, 4),))]
    assert [c.whole for c in stored_chunks_of([10, 11], [2], [4], [3], 4)] == [False] * 3


def test_vllm_does_not_wait_for_a_store_that_hangs_in_the_drive(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a lost chunk the drive is asked whether somebody else has it: that may take for ever."""
    places = bench.places(3)
    bench.stores.submit(1, places[:1], [ChunkBlocks(0, (BlockRun(1, 2, 1),), False)], None)
    bench.stores.wait({1}, 10)
    bench.stores.finished()
    gate, asked = threading.Event(), threading.Event()
    match = bench.store.match

    def hangs(*arguments: Any, **named: Any) -> int:
        asked.set()
        assert gate.wait(60)
        return match(*arguments, **named)

    monkeypatch.setattr(bench.store, "match", hangs)
    bench.stores.submit(2, places[1:], bench.chunks(2), None)
    assert asked.wait(10)
    began = time.monotonic()
    bench.stores.wait({2}, 0.1)
    assert time.monotonic() - began < 3
    assert [job.job_id for job in bench.stores.finished()] == [2]
    gate.set()
    monkeypatch.undo()
    bench.store_now(places)  # the thread lives, and counts are right
    assert bench.stores.dropped.snapshot() == {"partial": 1, "gave up": 2}
    assert bench.ring.free == bench.ring.slots
