"""The scheduler's side: what is there, what a request may load, what is worth storing.

Every method runs on the scheduler's thread. Lookups are answered from memory: one `match` of the whole prefix when a
lookup begins, and one when it has ended, which is the use that the store's order of eviction goes by.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)

from lmcache_nvme_backend.doors.counts import Counts
from lmcache_nvme_backend.doors.hybrid_prefix import CacheGroup, Place, PrefixOrder
from lmcache_nvme_backend.doors.native.transfers import NvmeLoadSpec, NvmeStoreSpec
from lmcache_nvme_backend.metrics import MetricsExporter, Values
from lmcache_nvme_backend.store import ChunkKey, ChunkStore, digest_fields

logger = logging.getLogger("vllm.lmcache_nvme_backend")

# A request whose loads failed this often is computed: each further try could fail on another chunk.
LOADS_TRIED = 3
# Chunks remembered as unloadable; the oldest is forgotten first, and then fails once more at worst.
FAILED_REMEMBERED = 65_536


class RequestPrefix:
    """One request: its block hashes, which go on growing, and what became of its lookups and stores."""

    def __init__(self, groups: Sequence[CacheGroup], hashes: Sequence[bytes], scope: str, era: str) -> None:
        self._scope, self.era = scope, era
        self._keys: dict[tuple[bytes, int], ChunkKey] = {}
        self._ends: dict[bytes, int] = {}
        self.hashes = hashes
        self.order = PrefixOrder(groups, self.key_of)
        self.found: set[ChunkKey] = set()
        self.prefix: list[ChunkKey] = []
        self.asked = False
        self.failures = 0
        self.refused_from: tuple[int, str] | None = None  # a depth, and why what follows it is not stored, either

    def key_of(self, block_hash: bytes, group: int) -> ChunkKey:
        key = self._keys.get((block_hash, group))
        if key is None:
            key = self._keys[block_hash, group] = digest_fields(self.era, self._scope, bytes(block_hash), group)
        return key

    def end(self, key: OffloadKey) -> int:
        """The boundary at which the chunk of vLLM's key ends, in block hashes; 0 where it is not of this prefix."""
        known = len(self._ends)
        if known > len(self.hashes) or (known and self._ends.get(self.hashes[known - 1]) != known):
            self._ends.clear()  # a streamed prompt that was cut and went on otherwise
            known = 0
        for i in range(known, len(self.hashes)):
            self._ends[self.hashes[i]] = i + 1
        return self._ends.get(get_offload_block_hash(key), 0)

    def place(self, key: OffloadKey) -> Place | None:
        """Where it stands in the prefix."""
        end = self.end(key)
        return self.order.place(self.hashes, end, get_offload_group_idx(key)) if end else None

    def chunk(self, key: OffloadKey) -> ChunkKey:
        return self.key_of(get_offload_block_hash(key), get_offload_group_idx(key))


class NvmeOffloadingManager(OffloadingManager):
    """vLLM's manager over a chunk store. Chunks that are still being written are misses.

    Args:
        groups: vLLM's KV cache groups.
        chunk_bytes: a chunk's size by vLLM's number of its group.
        hash_tokens: tokens a block hash stands for.
        close: called once, when the engine ends.
    """

    def __init__(
        self,
        store: ChunkStore,
        groups: Sequence[CacheGroup],
        chunk_bytes: Mapping[int, int],
        hash_tokens: int,
        close: Callable[[], None],
    ) -> None:
        self._store, self._groups, self._chunk_bytes, self._hash_tokens = store, groups, chunk_bytes, hash_tokens
        self._group_of = {group.number: group for group in groups}
        self._close = close
        self._metrics: MetricsExporter | None = None
        self._pending: set[ChunkKey] = set()  # on their way from a device to its staging ring
        self._pins: Counter[ChunkKey] = Counter()
        self._failed: dict[ChunkKey, None] = {}
        self._era = ""
        self._warned = False
        self._uses: list[list[ChunkKey]] = []
        self.hits = self.misses = 0
        self.dropped = Counts()

    def export(self) -> None:
        """Show what lookups found, and what was not worth storing, among the numbers of rank 0, the one that is looked
        at."""
        self._metrics = MetricsExporter(self._values, 0, "-scheduler")

    def _values(self) -> Values:
        return {
            "kvtier_chunks_hit_total": self.hits,
            "kvtier_chunks_missed_total": self.misses,
            "kvtier_chunks_dropped_total": self.dropped.snapshot(),
        }

    # -- a request ----------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def follow(self, req_context: ReqContext, hashes: Sequence[bytes], scope: str) -> None:
        """A request's block hashes, as vLLM goes on filling them, and who may share its chunks."""
        req_context.set_state(RequestPrefix(self._groups, hashes, scope, self._era))

    def begin_lookup(self, req_context: ReqContext, computed_tokens: int) -> None:
        """Find out what of a request's full-attention chunks is there, beyond what the device holds."""
        prefix = _prefix_of(req_context)
        prefix.found = set()
        if not self._may_load(prefix):
            return
        keys, depths = self._attention(prefix, computed_tokens)
        count = self._store.match(keys, again=True, depths=depths)
        prefix.found = set(keys[:count])

    def _may_load(self, prefix: RequestPrefix) -> bool:
        return prefix.failures < LOADS_TRIED and prefix.era == self._era

    def _attention(self, prefix: RequestPrefix, computed_tokens: int) -> tuple[list[ChunkKey], list[int]]:
        """The keys of the full-attention chunks beyond the computed tokens, head first, and their depths."""
        first = computed_tokens // self._hash_tokens
        found: list[tuple[int, ChunkKey]] = []
        for group in (g for g in self._groups if g.window is None):
            ends = range(first // group.hashes * group.hashes + group.hashes, len(prefix.hashes) + 1, group.hashes)
            found.extend(
                (prefix.order.depth(end, group.number), prefix.key_of(prefix.hashes[end - 1], group.number))
                for end in ends
            )
        found.sort()
        return [key for _, key in found], [depth for depth, _ in found]

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        prefix = _prefix_of(req_context)
        chunk = prefix.chunk(key)
        if chunk in self._failed or not self._may_load(prefix):
            return LookupResult.MISS
        if chunk in prefix.found:
            return LookupResult.HIT
        group = self._group_of[get_offload_group_idx(key)]
        # States and windows are asked for one by one, and so are the chunks of a prompt's tail, which end inside one.
        end = prefix.end(key)
        if (group.window is not None or end % group.hashes) and end:
            depths = (prefix.order.depth(end, group.number),)
            if self._store.match((chunk,), again=True, depths=depths):
                return LookupResult.HIT
        return LookupResult.MISS

    def end_lookup(self, req_context: ReqContext, computed_tokens: int, hit_tokens: int) -> None:
        """A lookup has found that many tokens beyond the device's own: the use that the store learns from.

        What the device holds is used, too: a prefix that is asked for all day shall not be the first to go from the
        drive because the device has always had it.
        """
        prefix = _prefix_of(req_context)
        end = (computed_tokens + hit_tokens) // self._hash_tokens
        used, depths = prefix.order.upto(prefix.hashes, end), prefix.order.depths_upto(end)
        missing, behind = self._attention(prefix, end * self._hash_tokens)
        # What the policy of a model with one kind of attention learns from is all that a request could use; with states
        # only what is within their reach counts.
        if prefix.order.hybrid:
            count = self._store.match(used, again=prefix.asked, depths=depths)
        else:
            count = self._store.match(used + missing, again=prefix.asked, depths=depths + behind)
        if count < len(used):  # the device holds a head that the store does not: what follows it is used all the same
            self._store.match([key for key in used if key in prefix.found], again=True)
        prefix.prefix = used
        if not prefix.asked:
            prefix.asked = True
            if used and not hit_tokens:
                self._uses.append(used)
            held = set(prefix.order.upto(prefix.hashes, computed_tokens // self._hash_tokens))
            self.hits += sum(key not in held for key in used)
            self.misses += len(missing)

    def take_uses(self) -> list[list[ChunkKey]]:
        """The prefixes, head first, that requests have used since the last call without loading anything."""
        uses, self._uses = self._uses, []
        return uses

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> Any:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        return CacheHitSource.DISK

    # -- loads --------------------------------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> NvmeLoadSpec:
        prefix = _prefix_of(req_context)
        chunks = [prefix.chunk(key) for key in keys]
        for chunk in chunks:
            if self._store.pin(chunk):
                self._pins[chunk] += 1
        return NvmeLoadSpec(chunks, prefix.prefix)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        prefix = _prefix_of(req_context)
        self._unpin(prefix.chunk(key) for key in keys)

    def _unpin(self, chunks: Iterable[ChunkKey]) -> None:
        for chunk in chunks:
            if self._pins[chunk] > 0:
                self._pins[chunk] -= 1
                self._store.unpin(chunk)
            if not self._pins[chunk]:
                del self._pins[chunk]

    def loads_failed(self, chunks: Iterable[ChunkKey]) -> None:
        """Some rank could not load these: they are misses until they have been stored again."""
        for chunk in chunks:
            self._failed[chunk] = None
        while len(self._failed) > FAILED_REMEMBERED:
            del self._failed[next(iter(self._failed))]

    def compare(self, namespace: str) -> None:
        """Say it aloud, once, where rank 0 has another namespace open than what lookups go to: nothing would be found,
        and nobody would know why."""
        own = self._store.namespace.digest
        if namespace and namespace != own and not self._warned:
            self._warned = True
            logger.error(
                "lmcache_nvme_backend: the scheduler looks in namespace %s and rank 0 stores in %s: nothing will be "
                "found. Their namespace.json tell what differs; please report it.", own, namespace,
            )  # fmt: skip

    def load_failed(self, req_context: ReqContext) -> None:
        """A request's load failed, and it will be looked up again."""
        _prefix_of(req_context).failures += 1

    # -- stores -------------------------------------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        """Which chunks to store: those that are not there, not on their way and worth it, and nothing behind one that
        is not."""
        prefix = _prefix_of(req_context)
        places = {key: place for key in keys if (place := prefix.place(key)) is not None}
        # From the tail, so that the head of what is there ends as the most recent.
        missing = [key for key in sorted(places, key=lambda k: -places[k].depth) if self._lacks(places[key])]
        wanted = {key for key in reversed(missing) if self._admits(prefix, key, places[key])}
        chosen = [key for key in keys if key in wanted]
        self._pending.update(places[key].key for key in chosen)
        numbers = Counter(get_offload_group_idx(key) for key in chosen)
        counts = [numbers[group.number] for group in self._groups]
        return PrepareStoreOutput(chosen, NvmeStoreSpec([places[key] for key in chosen], counts), [])

    def _lacks(self, place: Place) -> bool:
        if place.key in self._pending:
            return False
        return place.key in self._failed or not self._store.contains(place.key, depth=place.depth)

    def _admits(self, prefix: RequestPrefix, key: OffloadKey, place: Place) -> bool:
        if prefix.era != self._era:
            self.dropped.add("reset")
            return False
        if prefix.refused_from is not None and place.depth > prefix.refused_from[0]:
            self.dropped.add(prefix.refused_from[1])
            return False
        refusal = self._store.refusal(place.key, self._chunk_bytes[get_offload_group_idx(key)])
        if refusal is not None:
            prefix.refused_from = (place.depth, refusal.value)
            self.dropped.add(refusal.value)
        return refusal is None

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """The blocks have been read. What became of their writes is known to the store alone."""
        prefix = _prefix_of(req_context)
        for key in keys:
            chunk = prefix.chunk(key)
            self._pending.discard(chunk)
            self._failed.pop(chunk, None)

    # -- the whole ----------------------------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Nothing stored so far is found by this engine any more, and requests that run now store nothing more.

        The files stay: they hold what the weights that the engine was started with compute, and another start finds
        them again. Whoever resets may have changed the weights, so what is stored from now on is this engine's alone.
        """
        self._era = os.urandom(8).hex()
        for chunk, count in self._pins.items():
            for _ in range(count):
                self._store.unpin(chunk)
        self._pins.clear()
        self._pending.clear()
        self._failed.clear()

    def shutdown(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        self._close()


def _prefix_of(req_context: ReqContext) -> RequestPrefix:
    prefix: RequestPrefix | None = req_context.get_state(RequestPrefix)
    assert prefix is not None, "the connector names a request's hashes when it comes"
    return prefix
