"""Removing chunk files, with the slow part of it outside the root's lock."""

from __future__ import annotations

import os

from lmcache_nvme_backend.store import osio, recovery


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
