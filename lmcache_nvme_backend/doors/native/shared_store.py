"""One open store a process for each namespace, which the scheduler and a worker in one process share."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lmcache_nvme_backend.store import ChunkStore

_lock = threading.Lock()
_open: dict[tuple[str, str], tuple[ChunkStore, int]] = {}


def shared(root: str, digest: str, open_it: Callable[[], ChunkStore]) -> tuple[ChunkStore, Callable[[], None]]:
    """The store of namespace `digest` under `root`, opened by `open_it` where this process has it not, and what gives
    it back: the last one closes it. A second call of the same one does nothing."""
    place = (root, digest)
    with _lock:
        store, users = _open[place] if place in _open else (open_it(), 0)
        _open[place] = (store, users + 1)
    given_back = False

    def give_back() -> None:
        nonlocal given_back
        with _lock:
            if given_back:
                return
            given_back = True
            _, left = _open[place]
            if left > 1:
                _open[place] = (store, left - 1)
                return
            del _open[place]
        store.close()

    return store, give_back
