"""Which directory holds the NVMe tier, how large it may be, and what enforces that."""

from __future__ import annotations

import shlex
from pathlib import PurePosixPath

import msgspec

from kvtier.facts import Disk
from kvtier.plan.draft import Draft
from kvtier.plan.result import Effect, Step
from kvtier.units import GIB, gib
from lmcache_nvme_backend.errors import ConfigError

_RAM_FILESYSTEMS = {"tmpfs", "ramfs"}
_NETWORK_FILESYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "lustre", "ceph"}
_LARGEST_PROPOSED = 1024
"""GiB. More than that of one model's KV is rarely read again before it is evicted anyway."""


class Place(msgspec.Struct, frozen=True):
    """A directory for the tier, its size in bytes, and the file system it lies on (None where the facts lack it)."""

    path: str
    size: int
    disk: Disk | None
    capped: bool
    """The file system itself is no larger than the size: the kernel enforces it."""


def choose(draft: Draft, *, default_name: str = "kv-cache") -> Place:
    """The directory and size for an NVMe tier, as asked or proposed.

    Raises:
        ConfigError: a relative path, or more asked than the disk has.
        Refusal: no disk is fit for it.
    """
    wished, asked = draft.wishes.nvme, draft.wishes.nvme_gib
    if wished is not None:
        if not PurePosixPath(wished).is_absolute():
            raise ConfigError("--nvme", repr(wished), "an absolute directory", "Write the path from the root.")
        path, disk = wished, _holding(draft.facts.disks, wished)
    else:
        disk = _best(draft.facts.disks, asked)
        if disk is None:
            raise draft.refuse(
                "no-nvme", "no local file system with space was found for the tier. Name a directory with --nvme DIR."
            )
        path = disk.mount if disk.loopback else str(PurePosixPath(_room(disk)) / default_name)
        draft.say(
            "nvme-directory-proposed",
            Effect.CHOSE,
            f"{path}: on {disk.device} ({disk.filesystem}, "
            f"{gib(disk.free_bytes)} free), the best of {len(draft.facts.disks)} file systems seen. --nvme sets it.",
        )
    _remark(draft, path, disk)
    size = _size(draft, path, disk)
    return Place(path, size, disk, capped=disk is not None and disk.loopback and disk.total_bytes <= size)


def loopback_recipe(place: Place) -> str:
    """Commands that make an ext4 image of the tier's size and mount it: the kernel then enforces the cap."""
    image = f"{place.path.rstrip('/')}.img"
    if place.disk is not None and place.disk.mount != "/" and place.path == place.disk.mount:
        image = f"/var/lib/{PurePosixPath(place.path).name}.img"
    image, path = shlex.quote(image), shlex.quote(place.path)
    return (
        f"fallocate -l {place.size // GIB}G {image} && mkfs.ext4 -q -m 0 -F {image} && "
        f"mkdir -p {path} && mount -o loop,noatime {image} {path}"
    )


def _room(disk: Disk) -> str:
    return "/var/lib" if disk.mount == "/" else disk.mount


def _holding(disks: tuple[Disk, ...], path: str) -> Disk | None:
    inside = [disk for disk in disks if PurePosixPath(path).is_relative_to(disk.mount)]
    return max(inside, key=lambda disk: len(disk.mount), default=None)


def _best(disks: tuple[Disk, ...], asked_gib: int | None) -> Disk | None:
    fit = [
        disk
        for disk in disks
        if disk.filesystem not in _RAM_FILESYSTEMS | _NETWORK_FILESYSTEMS and disk.free_bytes > GIB
    ]
    if asked_gib is not None:
        images = [
            disk for disk in fit if disk.loopback and abs(disk.total_bytes - asked_gib * GIB) <= asked_gib * GIB // 10
        ]
        if images:
            return images[0]
    fit = [disk for disk in fit if not disk.loopback]
    return max(fit, key=lambda disk: (not disk.rotational, disk.o_direct is not False, disk.free_bytes), default=None)


def _size(draft: Draft, path: str, disk: Disk | None) -> int:
    asked = draft.wishes.nvme_gib
    if asked is not None:
        if disk is not None and asked * GIB > disk.total_bytes:
            raise ConfigError(
                "--nvme-gib",
                str(asked),
                f"at most {disk.total_bytes // GIB}, the size of {disk.mount}",
                "Ask for less, or name another directory with --nvme.",
            )
        if disk is not None and not disk.loopback and asked * GIB > disk.free_bytes:
            raise ConfigError(
                "--nvme-gib",
                str(asked),
                f"at most {disk.free_bytes // GIB}, what {disk.mount} has free",
                "Free some space, ask for less, or name another directory with --nvme.",
            )
        return asked * GIB
    if disk is None:
        raise ConfigError(
            "--nvme-gib",
            "nothing",
            "a whole number of GiB above 0",
            f"The facts do not hold the disk under {path}, so no size can be proposed: give --nvme-gib.",
        )
    if disk.loopback:
        return disk.total_bytes // GIB * GIB
    proposed = min(disk.free_bytes // 2 // GIB, _LARGEST_PROPOSED)
    if proposed < 1:
        raise draft.refuse("nvme-too-full", f"{disk.mount} has only {gib(disk.free_bytes)} free.")
    draft.say(
        "nvme-size-proposed",
        Effect.CHOSE,
        f"{proposed} GiB: half of the {gib(disk.free_bytes)} free on "
        f"{disk.mount}, at most {_LARGEST_PROPOSED} GiB. --nvme-gib sets it.",
    )
    return proposed * GIB


def _remark(draft: Draft, path: str, disk: Disk | None) -> None:
    if disk is None:
        draft.say(
            "nvme-not-in-facts",
            Effect.WARNED,
            f"the facts hold no file system for {path}: nothing about it is checked.",
        )
        return
    if disk.filesystem in _RAM_FILESYSTEMS:
        draft.say(
            "nvme-is-ram", Effect.WARNED, f"{path} lies on {disk.filesystem}: that is RAM, and gone after a reboot."
        )
    if disk.filesystem in _NETWORK_FILESYSTEMS:
        draft.say("nvme-is-network", Effect.WARNED, f"{path} lies on {disk.filesystem}, a network file system.")
    if disk.rotational:
        draft.say("nvme-is-rotational", Effect.WARNED, f"{disk.device} turns: expect seeks, not NVMe's line.")
    if disk.o_direct is False:
        draft.say("no-o-direct", Effect.WARNED, f"{path} refuses O_DIRECT: reads and writes go through the page cache.")


def cap(draft: Draft, place: Place) -> None:
    """For a tier that knows no quota of its own: say what caps it, or how to have it capped."""
    if place.capped:
        draft.say(
            "nvme-capped",
            Effect.NOTED,
            f"{place.path} is a file system of {gib(place.size)} in an image file: the kernel enforces the cap. When "
            "it is full, further stores fail and are not made.",
        )
        return
    draft.say(
        "fs-tier-has-no-quota",
        Effect.WARNED,
        "vLLM's fs tier has no quota and evicts nothing: the size is a hard cap only where the file system gives one. "
        "Without that it grows until the disk is full. Old folders, one a configuration, stay: prune them.",
    )
    draft.steps.append(
        Step(
            why=f"a hard cap of {gib(place.size)}: a loopback image of that size",
            command=loopback_recipe(place),
            required=draft.wishes.nvme_gib is not None,
        )
    )
