"""A crash-safe store of KV chunks on a local disk: keys and bytes in, bytes out.

No torch, no LMCache, no asyncio. `ChunkStore` is the whole of it; the other modules are one noun each.
"""

from lmcache_nvme_backend.store.keys import ChunkKey, digest_fields
from lmcache_nvme_backend.store.namespace import Namespace
from lmcache_nvme_backend.store.results import (
    GetResult,
    Hit,
    Miss,
    MissCause,
    PutResult,
    StoreStats,
    Usage,
)
from lmcache_nvme_backend.store.settings import StoreSettings
from lmcache_nvme_backend.store.store import ChunkStore

__all__ = [
    "ChunkKey",
    "ChunkStore",
    "GetResult",
    "Hit",
    "Miss",
    "MissCause",
    "Namespace",
    "PutResult",
    "StoreSettings",
    "StoreStats",
    "Usage",
    "digest_fields",
]
