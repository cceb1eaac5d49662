"""Replacing a file so that at any moment, for any reader, it is the whole old one or the whole new one."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvpatches.errors import ConfigError

# A holder only reads, parses and renames a few files. One that needs longer hangs on its file system.
LOCK_WAIT_SECONDS = 30.0
_LOCK_POLL_SECONDS = 0.05

_NO_LOCKS_HERE = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


def replace_file(path: Path, data: bytes, like: Path | None = None) -> None:
    """Put `data` at `path` by a rename, with mode and owner of `like` (default: of the file it replaces).

    A hard link or symbolic link to shared content (an installer's cache) is replaced, not written through. Raises
    ConfigError where the directory cannot be written; the old file is whole then.
    """
    model = like or path
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".kvpatches-tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(data)
                _take_after(out.fileno(), model)
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, path)  # noqa: PTH105
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        _sync_directory(path.parent)
    except OSError as err:
        raise cannot_change(path, err) from err


def _take_after(descriptor: int, model: Path) -> None:
    try:
        status = model.stat()
    except FileNotFoundError:
        return
    os.fchmod(descriptor, status.st_mode & 0o7777)
    if os.geteuid() == 0:
        os.fchown(descriptor, status.st_uid, status.st_gid)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_change(path: Path, err: OSError) -> ConfigError:
    """The refusal for a place that cannot be written, with what to do about it."""
    if err.errno == errno.EROFS:
        todo = "Nothing was changed. Patch when the image is built, or mount the file system writable."
    elif err.errno in (errno.EACCES, errno.EPERM):
        todo = (
            "Nothing was changed. Run as the owner (root for a system installation), or patch when the image is built."
        )
    else:
        todo = "Nothing was changed."
    return ConfigError(str(path), f"it cannot be changed: {err.strerror or err}", "a writable directory", todo)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`, also against other containers on this volume.

    The lock is gone with its process. Where the file system has no locks, go on without: each step is a rename of
    whole content, so two at once are still never a mixture. Raises ConfigError after LOCK_WAIT_SECONDS.
    """
    try:
        path.parent.mkdir(exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as err:
        raise cannot_change(path.parent, err) from err
    try:
        _acquire(descriptor, path)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + LOCK_WAIT_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as err:
            if err.errno in _NO_LOCKS_HERE:
                return
            if err.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise cannot_change(path, err) from err
        if time.monotonic() > deadline:
            raise ConfigError(
                str(path), "another patch run holds the lock", "one at a time", "Nothing was changed. Try again later."
            )
        time.sleep(_LOCK_POLL_SECONDS)


def drop_stale_bytecode(path: Path) -> list[Path]:
    """Remove compiled files that were not made from the source as it is now. Answers with those removed.

    A compiled file with a hash that is never checked would be run in place of the new source for ever.
    """
    removed = []
    status = path.stat()
    for compiled in _compiled_files(path):
        try:
            header = compiled.read_bytes()[:16]
            if _is_current(header, status, path):
                continue
            compiled.unlink()
        except FileNotFoundError:
            continue
        except OSError as err:
            raise cannot_change(compiled, err) from err
        removed.append(compiled)
    return removed


def _compiled_files(path: Path) -> list[Path]:
    folders = {path.parent / "__pycache__", Path(importlib.util.cache_from_source(str(path))).parent}
    return sorted(f for folder in folders for f in folder.glob(f"{path.stem}.*.pyc"))


def _is_current(header: bytes, status: os.stat_result, path: Path) -> bool:
    """Whether a compiled file's header (magic, flags, then time and size, or hash) speaks of this source."""
    if len(header) < 16:
        return False
    if int.from_bytes(header[4:8], "little") == 0:
        seconds, size = int.from_bytes(header[8:12], "little"), int.from_bytes(header[12:16], "little")
        return seconds == int(status.st_mtime) & 0xFFFFFFFF and size == status.st_size & 0xFFFFFFFF
    if header[:4] != importlib.util.MAGIC_NUMBER:
        return False  # another interpreter's hash, which only it can check
    return header[8:16] == importlib.util.source_hash(path.read_bytes())
