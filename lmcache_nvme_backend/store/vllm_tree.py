"""The directory of vLLM's own `fs` tier, seen from outside.

It has no quota, no account and no sessions, and leaves a folder behind for every configuration that ever ran. Read in
vLLM 0.32 (`vllm/v1/kv_offload/file_mapper.py`, `tiering/fs/`), and the same in the first release that had the tier:

::

    <root>/<model>_<12 hex>/config.json                          what the digest was made of
    <root>/<model>_<12 hex>_r<rank>/<3 hex>/<2 hex>_g<group>/<hash>.bin      blocks; the folders are the hash's head
    …/<hash>.bin_<number>.tmp                                    a block being written, or left by a crash

A block that is gone is a miss to vLLM: a lookup asks for the file, and a load of one that went after that fails alone.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from lmcache_nvme_backend.store import osio, recovery
from lmcache_nvme_backend.store.guest import Removed
from lmcache_nvme_backend.store.layout import VERSION_DIR
from lmcache_nvme_backend.store.removal import rmdir_quietly
from lmcache_nvme_backend.store.staleness import mark_stale
from lmcache_nvme_backend.store.survey import DAY_S, Part, Seen, Survey, now_ns

_CONFIG = "config.json"
_CONFIG_LIMIT = 16 << 20
_BASE = re.compile(r".*_[0-9a-f]{12}", re.DOTALL)
_RANK = re.compile(r"(.*_[0-9a-f]{12})_r(\d+)", re.DOTALL)
_OUTER = re.compile(r"[0-9a-f]{3}")
_INNER = re.compile(r"([0-9a-f]{2})_g\d+")
_BLOCK = re.compile(r"([0-9a-f]{8,})\.bin")
_TEMPORARY = re.compile(r"[0-9a-f]{8,}\.bin(?:_\d+)?\.tmp|\.o_direct_probe_\d+\.tmp")
# A temporary younger than this may be a write in flight; one write takes milliseconds.
YOUNG_TEMPORARY_S: Final = 3600
# Empty folders of a configuration go only where it has been idle for this long: a running engine makes its folders
# anew, but not between the making of one and the write into it.
IDLE_CONFIGURATION_S: Final = DAY_S


class VllmTree:
    """The root of a `fs` tier. Methods raise `OSError` where something cannot be listed."""

    kind = "vllm-fs"

    def __init__(self, root: str) -> None:
        """`root` is absolute and resolved."""
        self.root = root

    @classmethod
    def is_at(cls, root: str) -> bool:
        """Whether a configuration of the tier lies here: a folder with its config.json, or one with blocks."""
        return bool(cls(root).names())

    def names(self) -> list[str]:
        """The configurations: what their folders are called without the rank."""
        found = set()
        for name in recovery.list_dir_or_raise(self.root):
            rank = _RANK.fullmatch(name)
            if rank is not None and self._holds_blocks(name):
                found.add(rank[1])
            elif _BASE.fullmatch(name) and self._config(name) is not None:
                found.add(name)
        return sorted(found)

    def directory(self, name: str) -> str:
        return self.root

    def _ranks(self, name: str) -> list[str]:
        """The folders of a configuration's blocks, one a rank."""
        return [
            folder
            for folder in sorted(recovery.list_dir_or_raise(self.root))
            if (rank := _RANK.fullmatch(folder)) is not None and rank[1] == name
        ]

    def _holds_blocks(self, folder: str) -> bool:
        """Whether a folder looks like a rank's: nothing but folders of three hex digits, of which one has a group's."""
        outer = recovery.list_dir(f"{self.root}/{folder}")
        return all(_OUTER.fullmatch(name) for name in outer) and any(
            _INNER.fullmatch(inner) for name in outer for inner in recovery.list_dir(f"{self.root}/{folder}/{name}")
        )

    def _config(self, name: str) -> dict[str, Any] | None:
        try:
            if not stat.S_ISDIR(osio.lstat(f"{self.root}/{name}").st_mode):
                return None
            fd = osio.open(f"{self.root}/{name}/{_CONFIG}", os.O_RDONLY)
        except OSError:
            return None
        try:
            found = msgspec.json.decode(osio.pread(fd, _CONFIG_LIMIT, 0), type=dict[str, Any])
        except (OSError, msgspec.MsgspecError, ValueError):
            return None
        finally:
            osio.close_quietly(fd)
        return found if "model_name" in found and "inference_engine" in found else None

    def _files(self, name: str) -> Iterator[tuple[str, str]]:
        """Every file two folders down in a configuration's ranks, as (folder below the root, file's name)."""
        for rank in self._ranks(name):
            for outer in recovery.list_dir_or_raise(f"{self.root}/{rank}"):
                if not _OUTER.fullmatch(outer):
                    continue
                for inner in recovery.list_dir_or_raise(f"{self.root}/{rank}/{outer}"):
                    if _INNER.fullmatch(inner):
                        folder = f"{rank}/{outer}/{inner}"
                        for file in recovery.list_dir_or_raise(f"{self.root}/{folder}"):
                            yield folder, file

    def chunks(self, name: str) -> Iterator[Seen]:
        """Every block of a configuration; paths are below the root."""
        for folder, file in self._files(name):
            if _is_block(folder, file) and (found := _look(f"{self.root}/{folder}/{file}")) is not None:
                yield Seen(f"{folder}/{file}", found.st_size, 0, used_ns(found))

    def temporaries(self, name: str) -> Iterator[Seen]:
        """What writes in flight, or crashes, have left in a configuration."""
        found = [f"{folder}/{file}" for folder, file in self._files(name) if _TEMPORARY.fullmatch(file)]
        found += [f"{name}/{file}" for file in recovery.list_dir(f"{self.root}/{name}") if _TEMPORARY.fullmatch(file)]
        for path in found:
            if (seen := _look(f"{self.root}/{path}")) is not None:
                yield Seen(path, seen.st_size, 0, seen.st_mtime_ns)

    def part(self, name: str, at_ns: int) -> Part:
        facts = self._config(name)
        part = Part(name, facts, str(facts["model_name"]) if facts else None)
        part.count(self.chunks(name), at_ns)
        total = sum(recovery.count_tree(f"{self.root}/{folder}") for folder in (name, *self._ranks(name)))
        part.other_bytes = max(0, total - part.nbytes)
        if part.used_ns is None:
            part.used_ns = recovery.file_time(f"{self.root}/{name}/{_CONFIG}")
        return part

    def survey(self, unused_s: float) -> Survey:
        """Everything; a configuration that nobody has used for `unused_s` seconds is stale."""
        at_ns = now_ns()
        names = self.names()
        parts = [self.part(name, at_ns) for name in names]
        temporaries = [seen for name in names for seen in self.temporaries(name)]
        mark_stale(parts, unused_s, at_ns)
        temporary_bytes = sum(seen.nbytes for seen in temporaries)
        ours = {folder for name in names for folder in (name, *self._ranks(name))}
        return Survey(
            layout="vllm-fs",
            root=self.root,
            parts=parts,
            nbytes=sum(part.nbytes for part in parts),
            temporaries=len(temporaries),
            temporary_bytes=temporary_bytes,
            foreign_bytes=sum(
                recovery.count_tree(f"{self.root}/{name}")
                for name in recovery.list_dir(self.root)
                if name not in ours and name != VERSION_DIR
            ),
            ledgers=None,
            reads_count_as_use=not os.statvfs(self.root).f_flag & os.ST_NOATIME,
            taken_ns=at_ns,
        )

    def remove(self, files: Sequence[Seen], may_go: Callable[[str, os.stat_result], bool]) -> Removed:
        """Remove blocks where `may_go` still says so of what lies there now."""
        done = Removed()
        for seen in files:
            path = f"{self.root}/{seen.path}"
            try:
                found = osio.lstat(path)
                if not self._is_inside(seen.path) or not may_go(path, found):
                    done.spared += 1
                    continue
                osio.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                done.gone += 1
            except OSError:
                done.failed += 1
            else:
                done.chunks += 1
                done.nbytes += seen.nbytes
        return done

    def remove_if_empty(self, name: str, at_ns: int) -> bool:
        """Take the folders of a configuration away that has no block left and has been idle for a day."""
        idle_since = at_ns - int(IDLE_CONFIGURATION_S * 1e9)
        folders = [name, *self._ranks(name)]
        times = [recovery.file_time(f"{self.root}/{folder}") or 0 for folder in folders]
        times.append(recovery.file_time(f"{self.root}/{name}/{_CONFIG}") or 0)
        if max(times) > idle_since:
            return False
        for folder in folders[1:]:
            for outer in recovery.list_dir(f"{self.root}/{folder}"):
                for inner in recovery.list_dir(f"{self.root}/{folder}/{outer}"):
                    rmdir_quietly(f"{self.root}/{folder}/{outer}/{inner}")
                rmdir_quietly(f"{self.root}/{folder}/{outer}")
            if not rmdir_quietly(f"{self.root}/{folder}"):
                return False
        if recovery.list_dir(f"{self.root}/{name}") == [_CONFIG]:
            osio.unlink_quietly(f"{self.root}/{name}/{_CONFIG}")
        return rmdir_quietly(f"{self.root}/{name}")

    def _is_inside(self, path: str) -> bool:
        """Whether no folder on the way has become a symlink to somewhere else."""
        folder = path
        while folder := folder.rpartition("/")[0]:
            if not stat.S_ISDIR(osio.lstat(f"{self.root}/{folder}").st_mode):
                return False
        return True


def used_ns(found: os.stat_result) -> int:
    """When a block was last used: written, or read, as far as the file system keeps that (once a day, as a rule)."""
    return max(found.st_mtime_ns, found.st_atime_ns)


def _look(path: str) -> os.stat_result | None:
    try:
        found = osio.lstat(path)
    except OSError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def _is_block(folder: str, file: str) -> bool:
    """Whether the name is a block's, in the folders that its hash names."""
    block = _BLOCK.fullmatch(file)
    if block is None:
        return False
    _, outer, inner = folder.rsplit("/", 2)
    return block[1].startswith(outer + inner[:2])
