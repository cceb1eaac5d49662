"""LMCache's keys as the store's: digests of every field that tells chunks apart.

An agent's prefix is asked for on every turn, 512 chunks of it for a long one, and hashing each key again would be most
of a lookup. So the digests of keys seen lately are kept, by their scope: everything but the chunk's own hash.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lmcache_nvme_backend.doors import scope
from lmcache_nvme_backend.store import ChunkKey, digest_fields

# Some 6 MiB; chunks of 256 tokens for 8 million tokens. When they are more, all are forgotten and made anew.
NAMES_KEPT = 32768

logger = logging.getLogger("vllm.lmcache_nvme_backend")

_Scope = tuple[str | int, ...]


class ChunkNames:
    """Any thread may ask. `scoped`: a key without its request's mark (see `scope`) has no name."""

    def __init__(self, scoped: bool) -> None:
        self._scoped = scoped
        self._unscoped_said = False
        self._known: dict[_Scope, dict[int, ChunkKey]] = {}
        self._count = 0

    def of(self, key: Any) -> ChunkKey | None:
        """The chunk's name, or ``None`` for a key whose request did not pass a marked scheduler."""
        names = self.of_prefix((key,))
        return names[0] if names else None

    def of_prefix(self, keys: Sequence[Any]) -> list[ChunkKey]:
        """The names of the leading keys that have one."""
        names: list[ChunkKey] = []
        world = worker = dtype = tags = fields = None
        known: dict[int, ChunkKey] = {}
        for key in keys:
            # Identity first: it is the same objects nearly always, and working the scope out again is never wrong.
            if (
                key.dtype is not dtype
                or key.worker_id is not worker
                or key.world_size is not world
                or (key.tags is not tags and key.tags != tags)
                or fields is None
            ):
                world, worker, dtype, tags = key.world_size, key.worker_id, key.dtype, key.tags
                fields = self._scope(key)
                if fields is None:
                    break
                known = self._known.setdefault(fields, {})
            name = known.get(key.chunk_hash)
            if name is None:
                name = self._make(fields, known, key.chunk_hash)
            names.append(name)
        return names

    def _scope(self, key: Any) -> _Scope | None:
        tags = sorted((str(name), str(value)) for name, value in key.tags or ())
        if self._scoped and not any(name == scope.TAG for name, _ in tags):
            if not self._unscoped_said:
                self._unscoped_said = True
                logger.error(
                    "lmcache_nvme_backend: a request came without its LoRA and cache_salt mark and is neither stored "
                    "nor served: this vLLM or LMCache does not pass it on (kvtier_chunks_dropped_total, unmarked)."
                )
            return None
        return (key.world_size, key.worker_id, str(key.dtype), *(field for tag in tags for field in tag))

    def _make(self, fields: _Scope, known: dict[int, ChunkKey], chunk_hash: int) -> ChunkKey:
        world, worker, *rest = fields
        name = digest_fields(world, worker, chunk_hash, *rest)
        if self._count >= NAMES_KEPT:
            self._known, self._count = {}, 0  # `known` itself goes with its caller
        known[chunk_hash] = name
        self._count += 1
        return name
