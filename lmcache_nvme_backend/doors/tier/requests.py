"""What a tier has to know of a request beyond the keys that vLLM asks it for.

vLLM's tiering names a chunk by its block hash and its group, and a tier sees neither where in its prefix the chunk lies
nor which LoRA adapter computed it. vLLM's hash names an adapter by name and path, so the same path with other weights
after a restart has the same hashes; the key has to hold the weights' identity. Both are in the request, from which
vLLM makes the context that it passes to every call of a tier.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final

from lmcache_nvme_backend.doors.hybrid_prefix import CacheGroup, Place, PrefixOrder
from lmcache_nvme_backend.doors.scope import scope_of
from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.store import ChunkKey
from lmcache_nvme_backend.store.keys import KEY_BYTES

SCHEDULER: Final = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"
_GROUP_BYTES: Final = 4  # an offload key is a block hash and the group's number, big-endian


def split_key(key: bytes) -> tuple[bytes, int]:
    """An offload key's block hash and group number, as `make_offload_key` has put them together."""
    return key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "big")


class Origin:
    """Where a context comes from: kept in the context by vLLM itself (`ReqContext.set_state`)."""

    def __init__(self, request: Any) -> None:
        self.request = request


def note_requests(vllm_version: str) -> None:
    """Have every context carry its request. Wraps one function of vLLM's, once.

    Raises:
        ConfigError: vLLM makes contexts in another way than is known here.
    """
    module: Any = importlib.import_module(SCHEDULER)
    make = getattr(module, "_create_req_context", None)
    if getattr(make, "_kvtier", False):
        return
    if make is None or list(inspect.signature(make).parameters) != ["req"]:
        raise ConfigError(
            "vllm", f"version {vllm_version}, whose {SCHEDULER}._create_req_context is not known here",
            "versions 0.29 to 0.33", "Install one of them.",
        )  # fmt: skip

    @functools.wraps(make)
    def _create_req_context(req: Any) -> Any:
        context = make(req)
        context.set_state(Origin(req))
        return context

    _create_req_context._kvtier = True  # type: ignore[attr-defined]
    module._create_req_context = _create_req_context


class RequestPrefix:
    """One request's prefix: its keys, their places, and from where on nothing more of it is stored.

    Made on the scheduler's thread without work; `resolve` may read an adapter's files and belongs elsewhere. Everything
    else may be called from any thread.
    """

    def __init__(self, origin: Origin | None, groups: Sequence[CacheGroup]) -> None:
        self._request = origin.request if origin is not None else None
        self._groups = groups
        self._lock = threading.Lock()
        self._ends: dict[bytes, int] = {}
        self._names: dict[bytes, ChunkKey] = {}
        # Blake2b's key: the adapter's identity, nothing without one, None while it is not known.
        self._scope: bytes | None = None if getattr(self._request, "lora_request", None) is not None else b""
        self._cut: int | None = None
        self.order = PrefixOrder(groups, self._name)

    @property
    def resolved(self) -> bool:
        """Whether keys can be named: an adapter's identity is known, or there is none."""
        return self._scope is not None

    def resolve(self) -> None:
        """Find out which adapter it is. Reads files."""
        if self._scope is None:
            # The salt is part of vLLM's hash of the first block, and so of all that follow.
            scope = scope_of(self._request.lora_request, None)  # type: ignore[union-attr]
            self._scope = blake2b(scope.encode(), digest_size=KEY_BYTES).digest()

    def key(self, offload_key: bytes) -> ChunkKey:
        """The store's name for a chunk: 16 bytes of BLAKE2b, keyed by the adapter. Only where `resolved`.

        What goes in is vLLM's key as it is: all of one namespace are of one length, so no two can meet. A prompt has
        thousands of them, and they are asked for on the scheduler's thread.
        """
        found = self._names.get(offload_key)
        if found is None:
            assert self._scope is not None
            found = ChunkKey(blake2b(offload_key, digest_size=KEY_BYTES, key=self._scope).digest())
            self._names[offload_key] = found
        return found

    def _name(self, block_hash: bytes, group: int) -> ChunkKey:
        return self.key(block_hash + group.to_bytes(_GROUP_BYTES, "big"))

    @property
    def hashes(self) -> Sequence[bytes]:
        """The request's block hashes so far, head first; none where the request is not known. vLLM appends to them."""
        found: Sequence[bytes] = self._request.block_hashes if self._request is not None else ()
        return found

    def end_of(self, block_hash: bytes) -> int | None:
        """The boundary, in block hashes, at which a chunk with this hash ends; None where it is not of this request."""
        end = self._ends.get(block_hash)
        if end is None and self._request is not None:
            with self._lock:
                hashes = self._request.block_hashes
                for at in range(len(self._ends), len(hashes)):
                    self._ends[hashes[at]] = at + 1
            end = self._ends.get(block_hash)
        return end

    def place(self, offload_key: bytes) -> Place:
        """Where a chunk stands; a chunk of an unknown request stands alone."""
        block_hash, group = split_key(offload_key)
        end = self.end_of(block_hash)
        if end is None:
            return Place(self.key(offload_key), 0, None)
        return self.order.place(self.hashes, end, group)

    def attention_of(self, offload_key: bytes) -> int | None:
        """The chunk's group, where every load of a longer prefix needs its chunks; else None."""
        _, number = split_key(offload_key)
        full = any(group.number == number and group.window is None for group in self._groups)
        return number if full else None

    # --- what is stored of it

    def cut(self, end: int) -> None:
        """What ends behind this boundary is of no use any more: attention before it was not stored."""
        with self._lock:
            self._cut = end if self._cut is None else min(self._cut, end)

    def is_cut(self, end: int) -> bool:
        """Whether a chunk that ends there is of no use."""
        return self._cut is not None and end > self._cut
