"""Removing chunk files, with the slow part of it outside the root's lock."""

from __future__ import annotations

import os
import stat

from lmcache_nvme_backend.store import ghosts, osio, recovery, snapshot
from lmcache_nvme_backend.store.namespace import DESCRIPTION

# What the store notes about a namespace beside its description. Any of it may be missing.
HINTS = (snapshot.FILE, ghosts.FILE)


class Removal:
    """Files being removed. A context: at its end the space is given back to the file system.

    A name goes in microseconds; giving back the blocks behind it takes milliseconds for a chunk, and happens when the
    last descriptor goes. So each file is held open while its name is removed, inside the lock, and closed outside.
    """

    def __init__(self) -> None:
        self._held: list[int] = []

    def __enter__(self) -> Removal:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Give the space back now, which bounds the number of files held. Call it outside the lock."""
        while self._held:
            osio.close_quietly(self._held.pop())

    def remove(self, path: str) -> bool | None:
        """True where the file is gone now, None where it was gone before (another process accounted for it), False
        where it stays."""
        try:
            self._held.append(osio.open(path, os.O_PATH))
        except OSError:
            pass  # then unlink does all of it, or says what is wrong
        return remove_file(path)


def remove_file(path: str) -> bool | None:
    """`Removal.remove` where the time does not matter. An empty directory in a file's place goes, too; what lies
    behind a link in a directory's place is not the store's, and counts as gone."""
    try:
        if recovery.leads_outside(path):
            return None
        osio.unlink(path)
        return True
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (IsADirectoryError, PermissionError):
        try:
            osio.rmdir(path)
            return True
        except OSError:
            return False
    except OSError:
        return False


def remove_hints(directory: str) -> int:
    """Remove what the store noted about a namespace that is to go; returns the bytes, for the ledger. Call it inside
    the root's lock."""
    freed = 0
    for hint in HINTS:
        try:
            nbytes = recovery.count_own(f"{directory}/{hint}")
        except OSError:
            continue  # it stays, and so does its directory
        if remove_file(f"{directory}/{hint}"):
            freed += nbytes
    return freed


def remove_empty_namespace(directory: str) -> bool:
    """Take away the directories of a namespace that has no chunk left; anything unknown in them keeps them. Call it
    inside the root's lock, when no live session has the namespace open."""
    try:
        if not stat.S_ISDIR(osio.lstat(directory).st_mode):
            return False  # a symlink leads to somebody else's
    except OSError:
        return False
    for shard in recovery.list_dir(directory):
        if shard in recovery.SHARDS:
            rmdir_quietly(f"{directory}/{shard}")
    if recovery.list_dir(directory) not in ([], [DESCRIPTION]):
        return False
    osio.unlink_quietly(f"{directory}/{DESCRIPTION}")
    return rmdir_quietly(directory)


def rmdir_quietly(path: str) -> bool:
    """Remove a directory if it is empty."""
    try:
        osio.rmdir(path)
    except OSError:
        return False
    return True
