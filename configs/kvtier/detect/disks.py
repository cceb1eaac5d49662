"""File systems that could hold KV: what /proc/mounts lists, what sysfs says of the device, and an O_DIRECT probe."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import tempfile
from pathlib import Path

from kvtier.facts import Disk

_SKIPPED = {
    "proc",
    "sysfs",
    "devtmpfs",
    "devpts",
    "cgroup",
    "cgroup2",
    "securityfs",
    "debugfs",
    "tracefs",
    "mqueue",
    "hugetlbfs",
    "pstore",
    "bpf",
    "fusectl",
    "configfs",
    "autofs",
    "rpc_pipefs",
    "nsfs",
    "squashfs",
    "ramfs",
    "efivarfs",
    "binfmt_misc",
    "iso9660",
    "vfat",
    "fuse.portal",
    "fuse.gvfsd-fuse",
    "selinuxfs",
    "drvfs",
}
_SYSTEM_MOUNTS = ("/proc", "/sys", "/dev", "/run", "/boot", "/etc", "/snap")
_PROBE_BYTES = 4096


def candidates(root: Path) -> tuple[Disk, ...]:
    """Writable file systems, one entry a device, largest free space first."""
    found: dict[str, Disk] = {}
    for device, mount, filesystem, options in _mounts(root):
        if filesystem in _SKIPPED or mount.startswith(_SYSTEM_MOUNTS) or "ro" in options.split(","):
            continue
        disk = look(root, device, mount, filesystem)
        if disk is not None and (device not in found or len(mount) < len(found[device].mount)):
            found[device] = disk
    return tuple(sorted(found.values(), key=lambda disk: -disk.free_bytes))


def look(root: Path, device: str, mount: str, filesystem: str) -> Disk | None:
    """One mounted file system; None where it cannot be asked or has no size."""
    here = root / mount.lstrip("/")
    if not here.is_dir():
        return None
    try:
        stat = os.statvfs(here)
    except OSError:
        return None
    block = _block_device(root, device)
    total = max(stat.f_blocks * stat.f_frsize, _device_bytes(block))
    if total == 0:
        return None
    return Disk(
        mount=mount,
        filesystem=filesystem,
        device=device,
        total_bytes=total,
        free_bytes=stat.f_bavail * stat.f_frsize,
        rotational=_rotational(block),
        o_direct=takes_o_direct(here),
        loopback=bool(re.match(r"/dev/loop\d", device)),
    )


def takes_o_direct(directory: Path) -> bool | None:
    """Whether a file there can be written *and* read with O_DIRECT; None where nothing may be written there.

    Some file systems accept the open and refuse the write, so opening alone proves nothing.
    """
    try:
        descriptor, name = tempfile.mkstemp(prefix=".kvtier-probe-", dir=directory)
    except OSError:
        return None
    os.close(descriptor)
    try:
        return _write_and_read(name)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            Path(name).unlink()


def _write_and_read(name: str) -> bool:
    direct = os.open(name, os.O_RDWR | os.O_DIRECT)
    try:
        with mmap.mmap(-1, _PROBE_BYTES) as buffer:
            buffer.write(b"k" * _PROBE_BYTES)
            return os.pwritev(direct, [buffer], 0) == os.preadv(direct, [buffer], 0) == _PROBE_BYTES
    finally:
        os.close(direct)


def _mounts(root: Path) -> list[tuple[str, str, str, str]]:
    try:
        lines = (root / "proc/mounts").read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [
        (fields[0], _unescape(fields[1]), fields[2], fields[3]) for line in lines if len(fields := line.split()) >= 4
    ]


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _block_device(root: Path, device: str) -> Path | None:
    """The sysfs folder of a device; of a partition its own, whose parent holds the queue."""
    if not device.startswith("/dev/"):
        return None
    name = Path(os.path.realpath(device)).name if root == Path("/") else Path(device).name
    entry = root / "sys/class/block" / name
    return entry if entry.exists() else None


def _device_bytes(block: Path | None) -> int:
    try:
        return int((block / "size").read_text()) * 512 if block else 0  # sysfs counts in 512-byte sectors, always
    except (OSError, ValueError):
        return 0


def _rotational(block: Path | None) -> bool | None:
    """What the kernel says; None on virtual disks, where the flag is the hypervisor's default and says nothing."""
    if block is None or block.name.startswith(("vd", "xvd")) or "virtual" in _model(block).lower():
        return None
    for folder in (block, Path(os.path.realpath(block)).parent):
        try:
            return (folder / "queue/rotational").read_text().strip() == "1"
        except OSError:
            continue
    return None


def _model(block: Path) -> str:
    try:
        return (block / "device/model").read_text()
    except OSError:
        return ""
