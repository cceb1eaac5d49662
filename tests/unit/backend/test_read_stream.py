"""Read streams: in order, ahead of the consumer, through few slots, and never stuck."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lmcache_nvme_backend.staging import ReadStream, StagingMemory, StagingRing, read_stream

SLOT = 4096


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def ring():
    return StagingRing(StagingMemory(5 * SLOT), chunk_bytes=SLOT)  # four slots and the discard slot


def filling(value, log=None, gate=None, ok=True):
    def read(view):
        if gate is not None:
            gate.wait(30)
        view[:8] = value.to_bytes(8, "little")
        if log is not None:
            log.append(value)
        return ok

    return read


def value_of(slot):
    return int.from_bytes(slot.view[:8], "little")


def test_many_chunks_pass_through_few_slots_in_order(ring, pool):
    """A stream of any length needs the ring's slots and no more."""
    stream = ReadStream(ring, pool, [filling(i) for i in range(50)], ahead=3)
    assert [value_of(stream.take(i)) for i in range(50)] == list(range(50))
    stream.close()
    assert ring.free == 4 and stream.failed is None


def test_asking_again_for_the_same_chunk_gives_the_same_slot(ring, pool):
    """A connector asks for `.tensor` several times."""
    stream = ReadStream(ring, pool, [filling(i) for i in range(3)], ahead=1)
    assert stream.take(0) is stream.take(0)
    assert value_of(stream.take(1)) == 1
    stream.close()


def test_it_reads_ahead_but_not_without_end(ring, pool):
    """Bounded: others need slots too."""
    log = []
    stream = ReadStream(ring, pool, [filling(i, log) for i in range(10)], ahead=2)
    pool.shutdown(wait=True)
    assert sorted(log) == [0, 1, 2]
    stream.close()
    assert ring.free == 4


@pytest.mark.parametrize("how", ["answers no", "raises"])
def test_a_chunk_that_fails_fails_all_behind_it_and_still_gives_memory(ring, pool, how):
    """The consumer cannot stop in the middle: it gets valid, worthless memory, and the index is known."""

    def bad(view):
        if how == "raises":
            raise OSError("disk on fire")
        return False

    stream = ReadStream(ring, pool, [filling(0), filling(1), bad, filling(3)], ahead=3)
    assert [value_of(stream.take(i)) for i in (0, 1)] == [0, 1]
    assert stream.take(2) is ring.discard and stream.take(3) is ring.discard
    assert stream.failed == 2
    stream.close()
    assert ring.free == 4


class Event:
    def __init__(self):
        self.finished = False

    def query(self):
        return self.finished

    def synchronize(self):
        self.finished = True


def test_a_slot_is_used_again_only_after_the_devices_event(ring, pool):
    """While an event is not there, its slot is not read into; when nothing else is free, the oldest is waited for."""
    events = []

    def fence():
        events.append(Event())
        return events[-1]

    stream = ReadStream(ring, pool, [filling(i) for i in range(12)], ahead=1, fence=fence)
    slots = [stream.take(i) for i in range(3)]
    assert [event.finished for event in events] == [False, False]
    assert [value_of(slot) for slot in slots] == [0, 1, 2]
    for i in range(3, 12):
        assert value_of(stream.take(i)) == i
        assert sum(not event.finished for event in events) <= 4
    stream.close()
    assert all(event.finished for event in events)
    assert ring.free == 4


def test_a_stream_that_nobody_consumes_gives_its_slots_back(ring, pool):
    """Read-ahead never starves the one that runs; what was taken back is read again."""
    waiting = ReadStream(ring, pool, [filling(100 + i) for i in range(6)], ahead=5)
    for chunk in waiting._chunks[:4]:
        chunk.reading.result(30)
    assert ring.free == 0
    running = ReadStream(ring, pool, [filling(i) for i in range(6)], ahead=5)
    assert [value_of(running.take(i)) for i in range(6)] == list(range(6))
    running.close()
    assert [value_of(waiting.take(i)) for i in range(6)] == [100 + i for i in range(6)]
    waiting.close()
    assert ring.free == 4


def test_a_ring_that_stays_full_is_a_failure_not_a_hang(ring, pool, monkeypatch):
    """A drive that hangs with every slot costs a bounded wait."""
    monkeypatch.setattr(read_stream, "SLOT_WAIT_S", 0.05)
    held = [ring.acquire() for _ in range(4)]
    stream = ReadStream(ring, pool, [filling(0)], ahead=1)
    assert stream.take(0) is ring.discard and stream.failed == 0
    for slot in held:
        ring.release(slot)
    stream.close()
    assert ring.free == 4


def test_a_slot_is_not_lent_again_while_the_drive_still_writes_into_it(ring, pool):
    """An abandoned read gives its slot back when it ends, not before."""
    gate = threading.Event()
    stream = ReadStream(ring, pool, [filling(7, gate=gate)], ahead=1)
    while not stream._chunks[0].reading.running():
        pass
    stream.close()
    assert ring.free == 3
    gate.set()
    pool.shutdown(wait=True)
    assert ring.free == 4


def test_a_forgotten_stream_gives_everything_back(ring, pool):
    """LMCache's retrieve has no finally: the finaliser does it."""
    stream = ReadStream(ring, pool, [filling(i) for i in range(6)], ahead=3)
    stream.take(0)
    pool.shutdown(wait=True)
    del stream
    gc.collect()
    assert ring.free == 4


def test_a_closed_pool_fails_the_stream(ring):
    """Shutdown in the middle of a stream: no hang, no leaked slot."""
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    stream = ReadStream(ring, pool, [filling(0)], ahead=1)
    assert stream.take(0) is ring.discard and stream.failed == 0
    stream.close()
    assert ring.free == 4


def test_two_streams_consumed_at_once_never_wait_for_each_other(ring, pool):
    """Each asks the other for slots while it holds its own lock."""
    done = []

    def consume(base):
        stream = ReadStream(ring, pool, [filling(base + i) for i in range(200)], ahead=3)
        done.append([value_of(stream.take(i)) for i in range(200)] == [base + i for i in range(200)])
        stream.close()

    threads = [threading.Thread(target=consume, args=(base,)) for base in (0, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert done == [True, True]
    assert ring.free == 4


def test_read_ahead_that_ends_while_another_waits_is_taken_back(ring, pool):
    """A lender whose reads are still running has nothing to give yet: who waits asks again."""
    gate = threading.Event()
    waiting = ReadStream(ring, pool, [filling(100 + i, gate=gate) for i in range(4)], ahead=3)
    assert ring.free == 0
    threading.Timer(0.2, gate.set).start()
    running = ReadStream(ring, pool, [filling(1)], ahead=1)
    assert value_of(running.take(0)) == 1
    assert running.failed is None
    running.close()
    waiting.close()
    pool.shutdown(wait=True)
    assert ring.free == 4
