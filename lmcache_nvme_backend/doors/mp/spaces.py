"""The namespaces that a server has open: one a model, whatever its ranks, layouts and salts.

A model is opened at its first key, by the thread that works on it, and closed when it has not been used for a while:
a store that is open counts as live, and a model that nobody runs must not keep its part of the quota.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Final

import msgspec
from lmcache.logging import init_logger

from lmcache_nvme_backend.doors.counts import Counts
from lmcache_nvme_backend.doors.lmcache_compat import lmcache_version
from lmcache_nvme_backend.doors.mp.identity import ModelIdentities, Unproven, split_mark
from lmcache_nvme_backend.doors.mp.objects import Layout, chunk_key, ranks_of
from lmcache_nvme_backend.doors.mp.prefixes import PrefixBook
from lmcache_nvme_backend.doors.pins import PinLedger
from lmcache_nvme_backend.doors.store_opening import open_store
from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.settings import NvmeSettings
from lmcache_nvme_backend.store import ChunkKey, ChunkStore, Namespace

logger = init_logger("lmcache_nvme_backend")

# LMCache unlocks whatever it has locked, but for a request whose server end was aborted in between.
PIN_LIFETIME_S: Final = 300.0
# A model that nobody has asked for in this time is closed when another one is opened.
IDLE_S: Final = 900.0
# A namespace that could not be opened is tried again after this long.
RETRY_S: Final = 30.0


class Space:
    """One model's open namespace, with what is counted of it."""

    def __init__(self, model: str, store: ChunkStore) -> None:
        self.model, self.store = model, store
        self.pins = PinLedger(store.unpin, PIN_LIFETIME_S)
        self.book = PrefixBook()
        self.lookups = Counts()  # hit, missed
        self.failed = Counts()  # loads, by cause
        self.dropped = Counts()  # stores, by cause
        self.used_at = time.monotonic()
        self.closed = False

    def close(self) -> None:
        self.closed = True
        self.store.close()


class Chunk(msgspec.Struct, frozen=True):
    """A chunk of a space."""

    space: Space
    name: ChunkKey


class Spaces:
    """Thread-safe."""

    def __init__(self, settings: NvmeSettings, identities: ModelIdentities) -> None:
        self._settings, self._identities = settings, identities
        self._lock = threading.Lock()
        self._open: dict[str, Space] = {}  # by identity
        self._refused: dict[str, tuple[str, float]] = {}  # name -> why, since when
        self._closed = False
        self.unproven = Counts()  # chunks that could be neither stored nor looked up, by cause

    def of(self, name: str, layout: Layout, ranks: int = 1) -> Space | None:
        """The space of what LMCache calls `name`, whose chunks are needed from `ranks` ranks together. None where its
        KV is of unproven origin, or its namespace cannot be opened now; why is logged once."""
        with self._lock:
            if self._closed:
                return None
            refused = self._refused.get(name)
            if refused is not None and time.monotonic() - refused[1] < RETRY_S:
                return None
            try:
                identity = self._identities.of(name)
                space = self._open.get(identity)
                if space is None:
                    space = self._open_space(name, identity, layout, ranks)
            except (Unproven, ConfigError) as e:
                self._refuse(name, str(e))
                return None
            except Exception:
                logger.exception("lmcache_nvme_backend: the namespace of %r cannot be opened", name)
                self._refuse(name, "")
                return None
            self._refused.pop(name, None)
            space.used_at = time.monotonic()
            return space

    def chunk(self, key: Any, layout: Layout | None) -> Chunk | None:
        """Where an `ObjectKey` of that layout lies; None, and counted, where it may be neither stored nor served."""
        name = None if layout is None else chunk_key(key, layout)
        if layout is None or name is None:
            self.unproven.add("serialized" if layout is None else "short hash")
            return None
        space = self.of(key.model_name, layout, ranks_of(key))
        if space is None:
            self.unproven.add("unproven model")
            return None
        return Chunk(space, name)

    def _refuse(self, name: str, why: str) -> None:
        known = self._refused.get(name)
        if why and (known is None or known[0] != why):
            logger.error("lmcache_nvme_backend: nothing of %r is stored or served: %s", split_mark(name)[0], why)
        self._refused[name] = (why, time.monotonic())

    def _open_space(self, name: str, identity: str, layout: Layout, ranks: int) -> Space:
        self._close_idle()
        model, _ = split_mark(name)
        facts = {"door": "lmcache-mp", "model": identity, "lmcache": lmcache_version()}
        namespace = Namespace(facts, {"model": model})
        store = open_store(
            self._settings, namespace, chunk_bytes=layout.nbytes, item_sizes=layout.item_sizes, ranks=ranks
        )
        usage = store.usage()
        logger.info(
            "lmcache_nvme_backend: %r is served from %s: %d chunks, %.2f of %.2f GiB used under the root",
            model, store.directory, usage.namespace_chunks, usage.used_bytes / 2**30, usage.quota_bytes / 2**30,
        )  # fmt: skip
        space = self._open[identity] = Space(model, store)
        return space

    def _close_idle(self) -> None:
        now = time.monotonic()
        for identity, space in list(self._open.items()):
            if now - space.used_at > IDLE_S:
                del self._open[identity]
                space.close()

    def all(self) -> list[Space]:
        with self._lock:
            return list(self._open.values())

    def refused(self) -> dict[str, str]:
        """Models that are not served, and why."""
        with self._lock:
            return {name: why or "see the log" for name, (why, _) in self._refused.items()}

    def close(self) -> None:
        with self._lock:
            self._closed = True
            spaces, self._open = list(self._open.values()), {}
        for space in spaces:
            space.close()
