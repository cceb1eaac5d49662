"""What the store's tests build with: stores, keys, payloads, and looks at the disk."""

from __future__ import annotations

import mmap
import random
from pathlib import Path

from lmcache_nvme_backend.store import ChunkKey, ChunkStore, Hit, Namespace, PutResult, StoreSettings, digest_fields
from lmcache_nvme_backend.store.format import BLOCK, blocks_of

PAYLOAD = 5000
CHUNK_FILE = blocks_of(PAYLOAD) * BLOCK
NAMESPACE = Namespace({"model": "m", "dtype": "bf16", "rank": 0})
OTHER_NAMESPACE = Namespace({"model": "m", "dtype": "bf16", "rank": 1})


def open_store(
    root: Path, quota_chunks: float = 100, namespace: Namespace = NAMESPACE, **settings: object
) -> ChunkStore:
    """A store whose quota holds this many chunks of `PAYLOAD` bytes."""
    quota = int(quota_chunks * CHUNK_FILE)
    return ChunkStore.open(root, namespace, StoreSettings(quota_bytes=quota, **settings))  # type: ignore[arg-type]


def prefix(name: str, length: int) -> list[ChunkKey]:
    """The keys of a prefix, head first."""
    return [digest_fields(name, depth) for depth in range(length)]


def payload_of(key: ChunkKey, nbytes: int = PAYLOAD) -> bytes:
    """The bytes that the tests store under a key."""
    return random.Random(key).randbytes(nbytes)


def aligned(data: bytes) -> memoryview:
    """Page-aligned, writable memory that holds `data`."""
    view = memoryview(mmap.mmap(-1, max(len(data), 1)))[: len(data)]
    view[:] = data
    return view


def put(store: ChunkStore, key: ChunkKey, depth: int = 0, parent: ChunkKey | None = None) -> PutResult:
    return store.put(key, aligned(payload_of(key)), depth=depth, parent=parent, tokens=256)


def put_prefix(store: ChunkStore, keys: list[ChunkKey]) -> list[PutResult]:
    return [put(store, key, depth, keys[depth - 1] if depth else None) for depth, key in enumerate(keys)]


def holds(store: ChunkStore, key: ChunkKey) -> bool:
    """Whether a chunk can be loaded; fails where it loads with wrong bytes."""
    buffer = aligned(bytes(PAYLOAD))
    result = store.get(key, buffer)
    if isinstance(result, Hit):
        assert result == Hit(PAYLOAD, 256)
        assert buffer == payload_of(key), "wrong bytes"
        return True
    return False


def chunk_path(store: ChunkStore, key: ChunkKey) -> Path:
    (path,) = Path(store._directory).glob(f"*/{key.hex()}-*.kv")
    return path


def files_below(root: Path) -> dict[Path, int]:
    """Every file under the root and its size, without what the store keeps about itself."""
    own = ("account", "namespace.json")
    return {
        path: path.lstat().st_size
        for path in root.rglob("*")
        if path.is_file() and not path.is_symlink() and path.name not in own and path.parent.name != "sessions"
    }


def disk_bytes(root: Path) -> int:
    return sum(files_below(root).values())


def temporaries(root: Path) -> list[Path]:
    return list((root / "v1" / "temp").iterdir())


def session_files(root: Path) -> list[Path]:
    return list((root / "v1" / "sessions").iterdir())


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
