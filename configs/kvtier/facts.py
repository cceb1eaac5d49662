"""The facts about a box, as one plain struct that is also a JSON file.

Everything here is an observation; nothing is a conclusion except `memory`, which `detect.memory.classify` derives from
the others and which is stored with its evidence so that a person can check it.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec

from lmcache_nvme_backend.errors import ConfigError


class Vendor(StrEnum):
    """Who made a device."""

    NVIDIA = "nvidia"
    AMD = "amd"
    INTEL = "intel"


class Memory(StrEnum):
    """Where the device's memory lies."""

    DISCRETE = "discrete"
    """The device has its own memory; host RAM is something else."""
    UNIFIED = "unified"
    """Device and host share one DRAM: what one takes, the other lacks."""
    CPU = "cpu"
    """No accelerator: the KV pool itself is host RAM."""


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One accelerator, as the box shows it."""

    vendor: Vendor
    name: str
    memory_bytes: int | None = None
    """What the driver reports; None where it says ``[N/A]`` (MIG parents, vGPU, DGX Spark: proves nothing alone)."""
    compute_capability: str | None = None
    """NVIDIA only, such as ``12.1``."""
    integrated: bool | None = None
    """libcuda's CU_DEVICE_ATTRIBUTE_INTEGRATED; None where libcuda could not be asked."""
    pci_slot: str | None = None
    """Such as ``0000:00:02.0``."""
    pci_id: str | None = None
    """``vendor:device`` in hex, such as ``1002:1586``."""
    gtt_bytes: int | None = None
    """AMD only: host memory the device may map (mem_info_gtt_total)."""
    own_memory_files: tuple[str, ...] = ()
    """Intel only: sysfs files that exist only where the card has memory of its own."""
    link: str | None = None
    """What sysfs says of the PCIe link. It can be wrong: see `Measured`."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One finding that speaks for a memory kind, and where it was found."""

    source: str
    finding: str
    decides: bool = False


class Disk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A mounted file system that could hold KV."""

    mount: str
    filesystem: str
    device: str
    total_bytes: int
    """Size of the file system, or of the block device under it where that is known (a file system is a little less)."""
    free_bytes: int
    rotational: bool | None = None
    o_direct: bool | None = None
    """Whether a file there could be written and read with O_DIRECT; None where no probe was possible."""
    loopback: bool = False
    """A file system in an image file: its size is a hard cap, enforced by the kernel."""


class Versions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Installed distributions; None where absent."""

    vllm: str | None = None
    vllm_distribution: str | None = None
    lmcache: str | None = None
    torch: str | None = None
    python: str | None = None


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rates measured on this box, in bytes a second."""

    host_to_device: float | None = None
    device_to_host: float | None = None
    disk_write: float | None = None
    disk_read: float | None = None
    disk_path: str | None = None
    prefill_tokens_per_s: float | None = None


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One host of a set that serves one model together. The first one is rank 0."""

    name: str
    address: str
    interface: str | None = None
    """The network interface the ranks talk over, for NCCL and Gloo."""


class Facts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the box is. All sizes in bytes."""

    label: str = ""
    """A name for people, such as ``DGX Spark``."""
    arch: str
    devices: tuple[Device, ...] = ()
    jetson_files: tuple[str, ...] = ()
    """Those of the Jetson marker files that exist."""
    memory: Memory
    evidence: tuple[Evidence, ...] = ()
    user_memory: Memory | None = None
    """What the user said with ``--memory``; goes before everything found."""
    physical_cores: int
    ram_total: int
    ram_available: int
    shm_total: int
    shm_free: int
    swap_total: int = 0
    zram_total: int = 0
    """The part of the swap that is compressed RAM."""
    disks: tuple[Disk, ...] = ()
    open_files_soft: int = 1024
    open_files_hard: int = 1024
    container: bool = False
    wsl: bool = False
    versions: Versions = Versions()
    measured: Measured = Measured()
    environment: dict[str, str] = {}
    """Variables already set that change what may be planned."""
    patches: dict[str, str] = {}
    """What kvpatches says of the installed vLLM: patch id to state."""
    nodes: tuple[Node, ...] = ()
    """Empty on a single host."""


def load(path: Path) -> Facts:
    """Read a facts file written by ``kvtier detect --json``.

    Raises:
        ConfigError: the file is missing or is not a facts file.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Facts)
    except OSError as error:
        raise ConfigError(
            "--facts",
            f"{path} ({error.strerror})",
            "a readable file",
            "Write one with `kvtier detect --json > facts.json`.",
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(
            "--facts",
            f"{path}: {error}",
            "what `kvtier detect --json` prints",
            "Write it again with `kvtier detect --json`.",
        ) from error
