"""The chunks of one namespace as this process knows them: a hint, since other processes evict and store beside it."""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import repeat, takewhile

import msgspec

from lmcache_nvme_backend.store.format import BLOCK
from lmcache_nvme_backend.store.ghosts import Ghosts
from lmcache_nvme_backend.store.keys import ChunkKey
from lmcache_nvme_backend.store.policy import NO_STATES, EvictionPolicy
from lmcache_nvme_backend.store.snapshot import Snapshot


class Entry(msgspec.Struct, gc=False):
    """One chunk. The integers are shared objects: a million entries must stay small."""

    blocks: int  # file size in units of BLOCK
    depth: int
    parent: ChunkKey | None
    used_s: int = 0  # when this process knew it to be used last, in seconds since the epoch; 0 where it does not know

    @property
    def nbytes(self) -> int:
        return self.blocks * BLOCK


class Index:
    """Entries, pins, recency and the times that still have to go to disk. Every method may be called from any thread.

    Pins are counted by key and survive the entry: a chunk that another process evicted and that is stored again is
    still pinned by whoever had pinned it.
    """

    def __init__(self, policy: EvictionPolicy, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._policy = policy
        self._entries: dict[ChunkKey, Entry] = {}
        self._pins: Counter[ChunkKey] = Counter()
        self._blocks = 0
        self._ints: dict[int, int] = {}
        self._now_s = 0
        self._times: dict[ChunkKey, int] = {}  # key -> ns: uses not yet written to the file's times
        self._tails: dict[ChunkKey, None] = {}  # stored chunks whose ancestors are still to be refreshed
        self._used: set[ChunkKey] | None = None  # while the order is not known: what has been used since open
        self._gone: set[ChunkKey] = set()  # and what went

    # --- lookups

    def get(self, key: ChunkKey) -> Entry | None:
        return self._entries.get(key)

    def count_prefix(self, keys: Sequence[ChunkKey], start: int = 0) -> int:
        """How many leading keys are here, given that the first `start` are."""
        rest = keys[start:] if start else keys
        return start + len(list(takewhile(self._entries.__contains__, rest)))

    def use_prefix(self, keys: Sequence[ChunkKey], pin: bool, again: bool = False) -> int:
        """Count the leading keys that are here, refresh and optionally pin them: one step against eviction. `again`:
        the request has asked for them before."""
        with self._lock:
            count = self.count_prefix(keys)
            self._refresh_ancestors()
            found = keys if count == len(keys) else keys[:count]
            if again:
                self._policy.touch(found)
            else:
                self._policy.asked(keys, count)
            if found:
                self._note_use(found)
                if pin:
                    self._pins.update(found)
            return count

    def use(self, key: ChunkKey, pin: bool = False) -> bool:
        """Refresh a chunk for a request that has asked for it before, and optionally pin it. False where it is gone."""
        with self._lock:
            if key not in self._entries:
                return False
            self._refresh_ancestors()
            self._use((key,))
            if pin:
                self._pins[key] += 1
            return True

    def pin(self, key: ChunkKey) -> bool:
        with self._lock:
            if key not in self._entries:
                return False
            self._pins[key] += 1
            return True

    def unpin(self, key: ChunkKey) -> bool:
        with self._lock:
            count = self._pins.get(key, 0)
            if count > 1:
                self._pins[key] = count - 1
            elif count == 1:
                del self._pins[key]
            return count > 0

    def _use(self, prefix: Sequence[ChunkKey]) -> None:
        self._policy.touch(prefix)
        self._note_use(prefix)

    def _note_use(self, prefix: Sequence[ChunkKey]) -> None:
        now = self._clock_ns()
        self._times.update(zip(prefix, repeat(now)))
        if now // 1_000_000_000 != self._now_s:
            self._now_s = now // 1_000_000_000
        now_s = self._now_s  # one object for all uses within a second
        entries = self._entries
        for key in prefix:
            entries[key].used_s = now_s
        if self._used is not None:
            self._used.update(prefix)

    # --- changes

    def load(
        self, chunks: Iterable[tuple[ChunkKey, int, int]], states: Mapping[ChunkKey, int] = NO_STATES
    ) -> list[tuple[ChunkKey, int, int]]:
        """Fill an empty index with (key, depth, blocks), deepest first in the order of eviction; `states` is the
        policy's number for a key.

        Returns the ones whose key was here already under another name.
        """
        doubles = []
        by_depth: dict[int, list[ChunkKey]] = {}
        entries = self._entries
        share = self._ints.setdefault
        total = 0
        for chunk in chunks:
            key, depth, blocks = chunk
            if key in entries:
                doubles.append(chunk)
                continue
            depth = share(depth, depth)
            entries[key] = Entry(share(blocks, blocks), depth, None)
            total += blocks
            if depth in by_depth:
                by_depth[depth].append(key)
            else:
                by_depth[depth] = [key]
        with self._lock:
            self._blocks = total
            order = [key for depth in sorted(by_depth, reverse=True) for key in by_depth[depth]]
            self._policy.load(order, list(map(states.get, order, repeat(0))) if states else ())
            self._used = set()
        return doubles

    def restore(self, snapshot: Snapshot, exact: bool) -> None:
        """Fill an empty index from a snapshot. Where it is not `exact`, the order is to be found out by `rank`."""
        share = self._ints.setdefault
        depths, blocks = snapshot.depths, snapshot.blocks
        entries = map(Entry, map(share, blocks, blocks), map(share, depths, depths), repeat(None))
        with self._lock:
            self._entries = dict(zip(snapshot.keys, entries))
            self._blocks = sum(blocks)
            self._policy.load(snapshot.keys, snapshot.states)
            self._used = None if exact else set()

    def reconcile(
        self, shards: Iterable[tuple[int, Iterable[tuple[ChunkKey, int, int]]]]
    ) -> tuple[int, list[tuple[ChunkKey, int, int]]]:
        """Bring an index that came from a snapshot in line with a whole listing, (key, depth, blocks) by the keys'
        first byte, while nobody stores or evicts.

        Returns the bytes that are listed, and the ones whose key lies there under another name, too, which are not in
        that sum. `nbytes` may already be less: who removes a chunk takes it out of the index first.
        """
        listed = 0
        doubles = []
        named: list[list[ChunkKey]] = [[] for _ in range(256)]
        for key in self.all_keys():
            named[key[0]].append(key)
        for shard, chunks in shards:
            there = set()
            for chunk in chunks:
                key, depth, blocks = chunk
                if key in there:
                    doubles.append(chunk)
                    continue
                there.add(key)
                listed += blocks
                entry = self._entries.get(key)
                if entry is not None and (entry.depth != depth or entry.blocks != blocks):
                    self.discard(key, entry)
                    entry = None
                if entry is None:
                    self.add(key, depth, blocks, stored=False)
            named[shard] = [key for key in named[shard] if key not in there]
        for gone in named:
            for key in gone:
                self.discard(key)
        return listed * BLOCK, doubles

    def snapshot(self, closed: bool) -> Snapshot:
        """What `restore` takes. The index may change meanwhile: the lock is held for a copy alone."""
        with self._lock:
            self._refresh_ancestors()
            frozen = self._policy.frozen()
        order, states = frozen()
        keys: list[ChunkKey] = []
        depths, blocks = array("I"), array("I")
        for key in order:
            entry = self._entries.get(key)
            if entry is not None:
                keys.append(key)
                depths.append(entry.depth)
                blocks.append(entry.blocks)
        return Snapshot(keys, depths, blocks, list(map(states.get, keys, repeat(0))) if states else (), closed)

    @property
    def ghosts(self) -> Ghosts | None:
        """What is remembered of chunks that are not here."""
        return self._policy.ghosts

    def offered(self, key: ChunkKey) -> int:
        """How often a chunk that could be stored was asked for before this time, as far as the policy knows."""
        with self._lock:
            return self._policy.offered(key)

    def chance(self, key: ChunkKey) -> float:
        """How likely it would be asked for again before it had to go."""
        with self._lock:
            return self._policy.chance(key)

    def keep(self, key: ChunkKey, entry: Entry) -> None:
        """A chunk that was taken for eviction stays: it becomes the most recent."""
        with self._lock:
            if key not in self._entries:
                self._entries[key] = entry
                self._blocks += entry.blocks
                self._policy.add(key)
                if self._used is not None:
                    self._used.add(key)

    def rank(self, coldest_first: Sequence[ChunkKey]) -> None:
        """Order the loaded chunks like this. What has been used since they were loaded is more recent than all."""
        with self._lock:
            frozen = self._policy.frozen()
        _, states = frozen()
        install = self._policy.ranked(coldest_first, states)
        with self._lock:
            used, self._used = self._used or set(), None
            gone, self._gone = self._gone, set()
            install([key for key in gone if key not in self._entries], used)

    def add(self, key: ChunkKey, depth: int, blocks: int, parent: ChunkKey | None = None, stored: bool = True) -> bool:
        """A chunk is on disk now: `stored` by a caller just now, which is a use of its whole prefix, or found there.
        False where it was known already."""
        with self._lock:
            if key in self._entries:
                return False
            share = self._ints.setdefault
            self._entries[key] = Entry(share(blocks, blocks), share(depth, depth), parent)
            self._blocks += blocks
            self._policy.add(key)
            if self._used is not None:
                self._used.add(key)
            if stored:
                if parent is not None:
                    self._tails.pop(parent, None)
                self._tails[key] = None
            return True

    def discard(self, key: ChunkKey, entry: Entry | None = None) -> Entry | None:
        """Forget a chunk (only if it is still this entry, where one is given)."""
        with self._lock:
            found = self._entries.get(key)
            if found is None or (entry is not None and found is not entry):
                return None
            self._forget(key, found)
            return found

    def _forget(self, key: ChunkKey, entry: Entry) -> None:
        del self._entries[key]
        self._blocks -= entry.blocks
        self._policy.discard(key)
        self._times.pop(key, None)
        self._tails.pop(key, None)
        if self._used is not None:
            self._gone.add(key)

    # --- eviction and upkeep

    def take_coldest(
        self, need_bytes: int, headroom_bytes: int, limit: int, spare: Container[ChunkKey]
    ) -> list[tuple[ChunkKey, Entry]]:
        """Forget the coldest unpinned chunks that are not in `spare`, at most `limit`: until they make `need_bytes`,
        and further ones as far as they fit into the headroom."""
        with self._lock:
            self._refresh_ancestors()
            victims: list[tuple[ChunkKey, Entry]] = []
            for key in self._policy.coldest():
                if len(victims) >= limit:
                    break
                if key in self._pins or key in spare:
                    continue
                entry = self._entries[key]
                if need_bytes <= 0 and entry.nbytes > need_bytes + headroom_bytes:
                    break
                victims.append((key, entry))
                need_bytes -= entry.nbytes
            for key, entry in victims:
                self._forget(key, entry)
            return victims

    def ancestors(self, key: ChunkKey | None) -> list[ChunkKey]:
        """The known chain from `key` up to the head, tail first. Depths fall strictly, so a loop cannot hold it."""
        found: list[ChunkKey] = []
        entry = self._entries.get(key) if key is not None else None
        while key is not None and entry is not None:
            found.append(key)
            parent = entry.parent
            above = self._entries.get(parent) if parent is not None else None
            if above is None or above.depth >= entry.depth:
                break
            key, entry = parent, above
        return found

    def _refresh_ancestors(self) -> None:
        """Bring the prefixes of stored chunks up to date. Done only when the order matters, so that storing a prefix
        chunk by chunk costs one walk and not one a chunk."""
        tails, self._tails = self._tails, {}
        for tail in tails:
            self._use(self.ancestors(tail)[::-1])

    def take_times(self, limit: int) -> list[tuple[ChunkKey, Entry, int]]:
        """Up to `limit` uses that are not on disk yet, as (key, entry, ns)."""
        with self._lock:
            self._refresh_ancestors()
            times = self._times
            if len(times) <= limit:
                batch, self._times = times, {}
            else:
                batch = {key: times[key] for key, _ in zip(times, range(limit))}
                for key in batch:
                    del times[key]
            return [(key, self._entries[key], ns) for key, ns in batch.items() if key in self._entries]

    def mark(self) -> tuple[int, int, int]:
        """Another value where anything was stored, used or removed since, but for what happens within one second."""
        return (self._now_s, len(self._entries), self._blocks)

    def all_keys(self) -> list[ChunkKey]:
        with self._lock:
            return list(self._entries)

    def coldest_first(self) -> list[ChunkKey]:
        """The whole order of eviction, for tests and tools."""
        with self._lock:
            self._refresh_ancestors()
            return list(self._policy.coldest())

    @property
    def nbytes(self) -> int:
        return self._blocks * BLOCK

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries
