"""One open store a process for each namespace, which the scheduler and a worker in one process share."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lmcache_nvme_backend.store import ChunkStore


class _Shared:
    def __init__(self, store: ChunkStore) -> None:
        self.store, self.users = store, 0


_lock = threading.Lock()
_open: dict[tuple[str, str], _Shared] = {}


def shared(root: str, digest: str, open_it: Callable[[], ChunkStore]) -> tuple[ChunkStore, Callable[[], None]]:
    """The store of namespace `digest` under `root`, opened by `open_it` where this process has it not, and what gives
    it back: the last one closes it. A second call of the same one does nothing."""
    place = (root, digest)
    with _lock:
        found = _open.get(place) or _Shared(open_it())
        _open[place] = found
        found.users += 1
    given_back = False

    def give_back() -> None:
        nonlocal given_back
        with _lock:
            if given_back:
                return
            given_back = True
            found.users -= 1
            if found.users:
                return
            if _open.get(place) is found:
                del _open[place]
        found.store.close()

    return found.store, give_back
