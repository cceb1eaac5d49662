"""A small file system of its own, so that filling it and making it read-only hurts nobody else. Needs root."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class SmallDisk:
    """A mounted ext4 file system, what fills it, and what makes it read-only for whoever opens a path on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Nothing can be written, though the quota allows it."""
        with self._filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 20)):
                    pass
            except OSError:
                pass
        try:
            yield
        finally:
            self._filler.unlink()

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Every open for writing fails with EROFS. A remount would be refused while files are open for writing, so a
        read-only view of the same file system is laid over it."""
        _run("mount", "--bind", str(self.path), str(self.path))
        try:
            _run("mount", "-o", "remount,bind,ro", str(self.path))
            yield
        finally:
            _run("umount", "-l", str(self.path))


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[SmallDisk | None]:
    """A file system of ``mib`` MiB on a loop device under ``folder``; ``None`` where mounting is not possible here."""
    image, path = folder / "disk.img", folder / "disk"
    path.mkdir()
    with image.open("wb") as file:
        file.truncate(mib << 20)
    try:
        _run("mkfs.ext4", "-q", "-m", "0", str(image))
        _run("mount", "-o", "loop", str(image), str(path))
    except (OSError, subprocess.CalledProcessError):
        yield None
        return
    try:
        yield SmallDisk(path)
    finally:
        _run("umount", "-l", str(path))
        image.unlink()


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
