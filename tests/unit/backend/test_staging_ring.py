"""The ring: slots are lent, come back exactly once, and never grow in number."""

import threading

import pytest

from lmcache_nvme_backend.staging import StagingMemory, StagingRing


@pytest.fixture
def ring():
    return StagingRing(StagingMemory(4 * 8192), chunk_bytes=5000)


def test_slots_are_page_aligned_and_apart(ring):
    """O_DIRECT needs alignment; two loans never share a byte."""
    slots = [ring.acquire() for _ in range(4)]
    assert ring.acquire() is None
    for slot in slots:
        assert len(slot.view) == ring.slot_bytes == 8192
        slot.view[:] = bytes([slot.index]) * 8192
    assert all(set(slot.view) == {slot.index} for slot in slots)
    assert ring.memory.address % 4096 == 0


def test_a_second_release_of_one_loan_is_ignored(ring):
    """An explicit release and a finaliser may both run."""
    slot = ring.acquire()
    ring.release(slot)
    again = ring.acquire()
    ring.release(slot)
    assert ring.free == 3
    ring.release(again)
    assert ring.free == 4


def test_a_waiter_gets_the_slot_that_comes_back(ring):
    """A bounded wait ends with the release, not with its bound."""
    slots = [ring.acquire() for _ in range(4)]
    got = []
    waiter = threading.Thread(target=lambda: got.append(ring.acquire(timeout_s=30)))
    waiter.start()
    ring.release(slots[2])
    waiter.join(timeout=30)
    assert got[0].index == slots[2].index


def test_a_closed_ring_wakes_its_waiters_with_nothing(ring):
    """Shutdown never leaves a thread waiting."""
    for _ in range(4):
        ring.acquire()
    got = []
    waiter = threading.Thread(target=lambda: got.append(ring.acquire(timeout_s=30)))
    waiter.start()
    ring.close()
    waiter.join(timeout=30)
    assert got == [None]


def test_pinning_is_undone_when_the_memory_closes():
    """What the door registered with the device is unregistered."""
    calls = []
    memory = StagingMemory(8192, lambda a, n: calls.append(("pin", a, n)) or True, lambda a: calls.append(("unpin", a)))
    assert memory.pinned
    memory.close()
    memory.close()
    assert calls == [("pin", memory.address, 8192), ("unpin", memory.address)]
