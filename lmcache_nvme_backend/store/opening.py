"""Opening a root: what a person can have got wrong, said in one error; what is odd but works, in a warning."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.store import direct_io, osio
from lmcache_nvme_backend.store.layout import Layout
from lmcache_nvme_backend.store.settings import StoreSettings

_IN_MEMORY = ("tmpfs", "ramfs")


def check_root(root: Path, settings: StoreSettings) -> Layout:
    """Create the store's directories under an existing, writable root. Raises `ConfigError`."""
    allowed = "the absolute path of an existing directory on a local disk that this user can write"
    if not root.is_absolute():
        raise ConfigError("nvme.path", f"the relative path {str(root)!r}", allowed, "Give the whole path.")
    try:
        found = root.stat()
    except (OSError, ValueError) as error:
        raise ConfigError("nvme.path", f"{root}: {error}", allowed, "Create it, or mount the disk.") from None
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError("nvme.path", f"{root}, not a directory", allowed, "Name a directory.")
    if settings.quota_bytes <= 0:
        raise ConfigError("nvme.quota_gib", f"{settings.quota_bytes} bytes", "more than 0", "Give the cache a size.")
    layout = Layout(os.path.realpath(root))
    try:
        for path in (layout.base, layout.sessions, layout.temp):
            osio.make_dir(path)
            if not stat.S_ISDIR(osio.lstat(path).st_mode):
                raise ConfigError("nvme.path", f"{path}, not a directory", allowed, "Remove it.")
    except OSError as error:
        raise ConfigError(
            "nvme.path", f"{root}, where nothing can be written: {error.strerror}", allowed,
            "Mount it read-write and make this user its owner.",
        ) from None  # fmt: skip
    return layout


def choose_transfer(
    layout: Layout, settings: StoreSettings, probe_path: str, warnings: list[str]
) -> direct_io.Transfer:
    """Direct I/O where a probe of it succeeds. Raises `ConfigError` where it is demanded and does not."""
    kind = direct_io.file_system_type(layout.root)
    if kind in _IN_MEMORY:
        warnings.append(
            f"nvme.path: {layout.root} is on {kind}: chunks are kept in RAM, and are gone after a reboot. "
            "Name a directory on a disk."
        )
    if settings.direct_io == "off":
        return direct_io.Transfer(False, direct_io.Pool())
    failure = direct_io.probe(probe_path)
    if failure is not None:
        if settings.direct_io == "on":
            raise ConfigError(
                "nvme.direct_io", f"on, but {layout.root} ({kind or 'unknown file system'}) refuses it at {failure}",
                "on, where the file system takes direct I/O; auto; off", "Use auto, or another file system.",
            )  # fmt: skip
        warnings.append(
            f"nvme.direct_io: {layout.root} ({kind or 'unknown file system'}) refuses direct I/O at {failure}: "
            "using buffered I/O, which costs CPU and passes through the page cache."
        )
    return direct_io.Transfer(failure is None, direct_io.Pool())


def disk_refusal(layout: Layout, error: OSError) -> ConfigError:
    """What to say where the disk refuses a call that an open cannot do without."""
    return ConfigError(
        "nvme.path", f"{layout.root}, where the store cannot work: {error}",
        "a directory on a local disk that this user can write", "Check the disk and its mount.",
    )  # fmt: skip


def lock_refusal(layout: Layout, settings: StoreSettings, holder: int | None) -> ConfigError:
    """What to say where the root's lock was not free in time; `holder` is the process that has it, if known."""
    return ConfigError(
        "nvme.lock_wait_s",
        f"the lock of {layout.root} held for longer than {settings.lock_wait_s:g} s"
        + (f" by process {holder}" if holder is not None else ""),
        "a wait within which the other process finishes (counting the files of a large root takes seconds)",
        "End that process, or raise nvme.lock_wait_s.",
    )


def warn_of_other_files(layout: Layout, settings: StoreSettings, foreign_bytes: int, warnings: list[str]) -> None:
    """A sentence where files that are not the store's take most of the quota."""
    foreign_gib, quota_gib = foreign_bytes / 2**30, settings.quota_bytes / 2**30
    if foreign_gib > quota_gib / 2:
        warnings.append(
            f"nvme.path: {foreign_gib:.1f} GiB of other files lie under {layout.root} and count against "
            f"nvme.quota_gib ({quota_gib:g}). Give the cache a directory of its own."
        )
