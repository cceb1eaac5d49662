"""The operating system's calls that the store uses: one seam, so that a test can make any of them fail.

The rest of the store reaches the file system through this module only, always by attribute (`osio.open(...)`), so
that replacing an attribute here replaces the call everywhere. All raise `OSError`; EINTR is retried by Python itself.
"""

# Paths are strings here: they are built for every chunk.
# ruff: noqa: PTH101, PTH102, PTH104, PTH106, PTH108, PTH208
from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Sequence

O_DIRECT = os.O_DIRECT
FULL = (errno.ENOSPC, errno.EDQUOT)  # what a full disk answers


def open(path: str, flags: int, mode: int = 0o600) -> int:
    """A descriptor that follows no symlink, blocks on no FIFO and is not inherited."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, mode)


def close(fd: int) -> None:
    os.close(fd)


def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    return os.preadv(fd, buffers, offset)


def pwritev(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    return os.pwritev(fd, buffers, offset)


def pread(fd: int, length: int, offset: int) -> bytes:
    return os.pread(fd, length, offset)


def pwrite(fd: int, data: bytes, offset: int) -> int:
    return os.pwrite(fd, data, offset)


def fdatasync(fd: int) -> None:
    os.fdatasync(fd)


def fadvise_dontneed(fd: int) -> None:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def fstat(fd: int) -> os.stat_result:
    return os.fstat(fd)


def lstat(path: str) -> os.stat_result:
    return os.lstat(path)


def fchmod(fd: int, mode: int) -> None:
    os.fchmod(fd, mode)


def chmod(path: str, mode: int) -> None:
    os.chmod(path, mode)


def rename(source: str, target: str) -> None:
    os.rename(source, target)


def unlink(path: str) -> None:
    os.unlink(path)


def mkdir(path: str, mode: int = 0o700) -> None:
    os.mkdir(path, mode)


def rmdir(path: str) -> None:
    os.rmdir(path)


def listdir(path: str) -> list[str]:
    """The names in a directory, which is not a link to one."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def utime(path: str, ns: int) -> None:
    os.utime(path, ns=(ns, ns), follow_symlinks=False)


def flock(fd: int, operation: int) -> None:
    fcntl.flock(fd, operation)


def _advance(buffers: list[memoryview], done: int) -> None:
    while buffers and done >= len(buffers[0]):
        done -= len(buffers.pop(0))
    if buffers and done:
        buffers[0] = buffers[0][done:]


def write_fully(fd: int, buffers: Sequence[memoryview], offset: int = 0) -> None:
    """Write every byte, over any number of short writes."""
    rest = [view for view in buffers if len(view)]
    while rest:
        done = pwritev(fd, rest, offset)
        if done <= 0:
            raise OSError(errno.EIO, "a write made no progress")
        offset += done
        _advance(rest, done)


def read_fully(fd: int, buffers: Sequence[memoryview], offset: int = 0) -> int:
    """Fill the buffers, over any number of short reads; returns the bytes read, fewer only at the end of the file."""
    rest = [view for view in buffers if len(view)]
    total = 0
    while rest:
        done = preadv(fd, rest, offset + total)
        if done <= 0:
            break
        total += done
        _advance(rest, done)
    return total


def make_dir(path: str) -> None:
    """Create one directory with mode 0700 whatever the umask; an existing one is left as it is."""
    try:
        mkdir(path, 0o700)
    except FileExistsError:
        return
    chmod(path, 0o700)


def make_dir_in_place_of_file(path: str) -> None:
    """`make_dir`, after removing a file or symlink that has the directory's name."""
    try:
        mode = lstat(path).st_mode
    except FileNotFoundError:
        pass
    else:
        if not stat.S_ISDIR(mode):
            unlink(path)
    make_dir(path)


def unlink_quietly(path: str) -> bool:
    try:
        unlink(path)
    except OSError:
        return False
    return True


def close_quietly(fd: int) -> None:
    """For descriptors whose data no longer matter. The kernel frees one also where close reports an error."""
    try:
        close(fd)
    except OSError:
        pass


def write_file_atomically(path: str, temporary: str, data: bytes) -> None:
    """Replace `path` by `data`: whoever opens it sees the old content or the new one."""
    fd = open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        try:
            fchmod(fd, 0o600)
            write_fully(fd, [memoryview(data)])
        finally:
            close_quietly(fd)
        rename(temporary, path)
    except OSError:
        unlink_quietly(temporary)
        raise
