"""What the backend remembers of requests: where their prefixes stand, and which of them lost a chunk.

A chunk without its predecessors is of no use. LMCache counts a request's tokens as saved whether or not a chunk was
stored, so this is where the rest of a prefix that lost a chunk is refused, in this step and in later ones.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lmcache_nvme_backend.doors.counts import PREFIX_LOST
from lmcache_nvme_backend.store import ChunkKey

REQUESTS_KEPT = 4096  # far more than an engine runs at once; a forgotten one only loses a hint
LINKS_KEPT = 65536  # parents of chunks that were looked up and may be stored next: some 10 MiB at most


class StoreRequest:
    """One request's prefix as far as it has been stored."""

    __slots__ = ("cause", "last", "refused_from")

    def __init__(self) -> None:
        self.last: ChunkKey | None = None
        self.refused_from: int | None = None
        self.cause = PREFIX_LOST  # why what follows is refused

    def refuse(self, depth: int, cause: str = PREFIX_LOST) -> None:
        """Chunk ``depth`` (0 is the head) was lost: it and all that follow are refused, for ``cause``."""
        if self.refused_from is None or depth < self.refused_from:
            self.refused_from, self.cause = depth, cause

    def offered_from(self, depth: int) -> None:
        """A store begins at chunk ``depth``: where that is before the loss, the prefix is being made good."""
        if self.refused_from is not None and depth < self.refused_from:
            self.refused_from = None

    def admits(self, depth: int) -> bool:
        return self.refused_from is None or depth < self.refused_from


class StoreCall:
    """One ``LMCacheEngine.store``: chunks ``first`` to ``last`` (exclusive) of a request's prefix.

    ``key`` is LMCache's key of the chunk it is working on, as the token database announced it; ``filling`` is the
    object whose bytes the connector is copying.
    """

    __slots__ = ("filling", "first", "key", "last", "ran_out", "request", "streams", "submitted", "targets")

    def __init__(self, request: StoreRequest, first: int, last: int, streams: bool) -> None:
        self.request, self.first, self.last, self.streams = request, first, last, streams
        self.key: Any = None
        self.filling: Any = None
        self.targets = 0  # objects handed out
        self.submitted = 0  # objects that came back to be put
        self.ran_out = False  # the ring had no slot for the next chunk


_calls = threading.local()


def current_call() -> StoreCall | None:
    """The store that this thread is in."""
    call: StoreCall | None = getattr(_calls, "current", None)
    return call


@contextmanager
def entered(call: StoreCall) -> Iterator[StoreCall]:
    """Make ``call`` this thread's current one. An exception on the way refuses what had not come back by then."""
    _calls.current = call
    try:
        yield call
    except BaseException:
        call.request.refuse(call.first + call.submitted)
        raise
    finally:
        _calls.current = None


class RequestBook:
    """Thread-safe; bounded; forgetting is always safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: OrderedDict[str, StoreRequest] = OrderedDict()
        self._links: OrderedDict[ChunkKey, ChunkKey] = OrderedDict()

    def request(self, request_id: str | None) -> StoreRequest:
        if request_id is None:
            return StoreRequest()
        with self._lock:
            request = self._requests.setdefault(request_id, StoreRequest())
            self._requests.move_to_end(request_id)
            while len(self._requests) > REQUESTS_KEPT:
                self._requests.popitem(last=False)
            return request

    def link(self, keys: Sequence[ChunkKey], found: int) -> None:
        """Remember the predecessors of the chunks that a lookup of a prefix did not find."""
        with self._lock:
            for i in range(max(found, 1), len(keys)):
                self._links[keys[i]] = keys[i - 1]
            while len(self._links) > LINKS_KEPT:
                self._links.popitem(last=False)

    def parent(self, key: ChunkKey) -> ChunkKey | None:
        """The predecessor, if a lookup told; the link is used up."""
        with self._lock:
            return self._links.pop(key, None)
