"""What is remembered of requests and pins: bounded, and safe to forget."""

from lmcache_nvme_backend.doors import pins as pins_module
from lmcache_nvme_backend.doors.pins import PinLedger
from lmcache_nvme_backend.doors.requests import REQUESTS_KEPT, RequestBook, StoreRequest
from lmcache_nvme_backend.store import digest_fields


def key(i):
    return digest_fields(i)


def test_a_prefix_that_lost_a_chunk_admits_only_what_comes_before():
    """The earliest loss counts."""
    request = StoreRequest()
    assert request.admits(100)
    request.refuse(7)
    request.refuse(9)
    assert request.admits(6)
    assert not request.admits(7)


def test_a_prefix_that_is_offered_again_from_before_the_loss_is_made_good():
    """After a roll-back vLLM computes the lost chunks again; a later part alone changes nothing."""
    request = StoreRequest()
    request.refuse(7)
    request.offered_from(7)
    request.offered_from(9)
    assert not request.admits(8)
    request.offered_from(5)
    assert request.admits(8)


def test_a_request_keeps_its_state_over_steps():
    """Later steps of one request see the loss of an earlier one; other requests do not."""
    book = RequestBook()
    book.request("a").refuse(3)
    assert not book.request("a").admits(3)
    assert book.request("b").admits(3)
    assert book.request(None) is not book.request(None)


def test_requests_are_bounded():
    """A server that runs for weeks does not grow."""
    book = RequestBook()
    for i in range(REQUESTS_KEPT + 10):
        book.request(str(i))
    assert len(book._requests) == REQUESTS_KEPT


def test_a_lookup_tells_the_predecessors_of_what_it_missed():
    """Chunks found need no link; the first missing one hangs on the last found."""
    book = RequestBook()
    keys = [key(i) for i in range(4)]
    book.link(keys, found=2)
    assert [book.parent(k) for k in keys] == [None, None, keys[1], keys[2]]
    assert book.parent(keys[3]) is None


def test_pins_are_counted_and_given_back_once():
    """Two lookups of one prefix pin twice; a third unpin finds nothing."""
    undone = []
    ledger = PinLedger(lambda k: undone.append(k) or True, lifetime_s=1000)
    ledger.taken([key(1)])
    ledger.taken([key(1), key(2)])
    assert [ledger.given_back(key(1)) for _ in range(3)] == [True, True, False]
    assert undone == [key(1), key(1)]


def test_pins_of_aborted_requests_end(monkeypatch):
    """A request that never runs gives nothing back: its pins expire at a later lookup."""
    now = [100.0]
    monkeypatch.setattr(pins_module.time, "monotonic", lambda: now[0])
    undone = []
    ledger = PinLedger(lambda k: undone.append(k) or True, lifetime_s=300)
    ledger.taken([key(1)])
    ledger.taken([key(1)])
    now[0] += 301
    ledger.taken([key(2)])
    assert undone == [key(1), key(1)]
    assert ledger.expired == 2
    assert not ledger.given_back(key(1))
