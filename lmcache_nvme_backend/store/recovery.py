"""Reading a root's directories: the index of a namespace, and the size of everything. No error on any garbage."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from lmcache_nvme_backend.store import osio
from lmcache_nvme_backend.store.format import BLOCK, parse_names
from lmcache_nvme_backend.store.keys import ChunkKey
from lmcache_nvme_backend.store.layout import VERSION_DIR, Layout
from lmcache_nvme_backend.store.namespace import DESCRIPTION, is_namespace_dir

SHARDS = tuple(f"{number:02x}" for number in range(256))

Chunk = tuple[ChunkKey, int, int]  # key, depth, blocks


def list_dir(path: str) -> list[str]:
    """The names in a directory; none where it is missing, unreadable or no directory."""
    try:
        if not stat.S_ISDIR(osio.lstat(path).st_mode):
            return []
        return osio.listdir(path)
    except OSError:
        return []


def shard_chunks(namespace_dir: str, shard: str) -> Iterator[Chunk]:
    chunks, _ = parse_names(list_dir(f"{namespace_dir}/{shard}"), shard)
    return chunks


def namespace_chunks(namespace_dir: str) -> Iterator[Chunk]:
    """Every chunk of a namespace, by name alone."""
    for shard in SHARDS:
        yield from shard_chunks(namespace_dir, shard)


def file_time(path: str) -> int | None:
    """When a chunk was last used (ns), None where it is gone."""
    try:
        return osio.lstat(path).st_mtime_ns
    except OSError:
        return None


def count_root(layout: Layout) -> int:
    """Bytes of all files under the root: chunks by their names, anything else by its size.

    Not counted: what the store keeps about itself (account, sessions, namespace.json, some hundred bytes a namespace),
    and temporaries, for which their session's reservation stands.
    """
    total = 0
    for name in list_dir(layout.base):
        path = f"{layout.base}/{name}"
        if is_namespace_dir(name):
            total += count_namespace(path)
        elif name not in ("account", "sessions", "temp"):
            total += count_tree(path)
    for name in list_dir(layout.root):
        if name != VERSION_DIR:
            total += count_tree(f"{layout.root}/{name}")
    return total


def count_namespace(namespace_dir: str) -> int:
    total = 0
    for name in list_dir(namespace_dir):
        path = f"{namespace_dir}/{name}"
        if name in SHARDS:
            chunks, strays = parse_names(list_dir(path), name)
            total += sum(blocks for _, _, blocks in chunks) * BLOCK
            total += sum(count_tree(f"{path}/{stray}") for stray in strays)
        elif name != DESCRIPTION:
            total += count_tree(path)
    return total


def count_tree(path: str) -> int:
    """Bytes of a file, or of all files below a directory of the same file system; symlinks are not followed."""
    try:
        top = osio.lstat(path)
    except OSError:
        return 0
    if not stat.S_ISDIR(top.st_mode):
        return top.st_size if stat.S_ISREG(top.st_mode) else 0
    total = 0
    pending = [path]
    while pending:
        directory = pending.pop()
        for name in list_dir(directory):
            child = f"{directory}/{name}"
            try:
                found = osio.lstat(child)
            except OSError:
                continue
            if stat.S_ISDIR(found.st_mode):
                if found.st_dev == top.st_dev and not os.path.ismount(child):
                    pending.append(child)
            elif stat.S_ISREG(found.st_mode):
                total += found.st_size
    return total
