"""NVIDIA devices: libcuda by ctypes, nvidia-smi, and /proc where neither is there."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from kvtier.facts import Device, Vendor

_INTEGRATED = 18  # CU_DEVICE_ATTRIBUTE_INTEGRATED
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_SMI_FIELDS = "name,compute_cap,memory.total,pci.device_id,pci.bus_id"
_SMI_TIMEOUT_S = 20
"""nvidia-smi waits for the driver to wake the device."""
Smi = Callable[[], str | None]


def devices(root: Path, smi: Smi | None = None, cuda: bool = True) -> tuple[Device, ...]:
    """Every NVIDIA device that can be seen, by the first source that knows any; libcuda's attribute is added to
    each."""
    asked = from_cuda() if cuda and root == Path("/") else ()
    listed = parse_smi((smi or run_smi)() or "") or from_proc(root)
    if not listed:
        return asked
    merged = []
    for index, device in enumerate(listed):
        if index < len(asked):
            device = _with(device, asked[index])
        merged.append(device)
    return tuple(merged)


def run_smi() -> str | None:
    """nvidia-smi's table, or None where there is no nvidia-smi or it fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_SMI_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def parse_smi(table: str) -> tuple[Device, ...]:
    """nvidia-smi's CSV lines as devices. ``[N/A]`` and ``Not Supported`` stand for a memory that it does not know."""
    found = []
    for line in table.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) < 5:
            continue
        name, capability, memory, identity, slot = fields[:5]
        found.append(
            Device(
                vendor=Vendor.NVIDIA,
                name=name,
                compute_capability=capability if re.fullmatch(r"\d+\.\d+", capability) else None,
                memory_bytes=int(memory) << 20 if memory.isdigit() else None,
                pci_id=f"10de:{identity[2:6].lower()}" if re.fullmatch(r"0x[0-9A-Fa-f]{8}", identity) else None,
                pci_slot=slot or None,
            )
        )
    return tuple(found)


def from_proc(root: Path) -> tuple[Device, ...]:
    """The driver's own list, which is there in containers that lack nvidia-smi."""
    found = []
    for information in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        fields = dict(
            line.split(":", 1) for line in information.read_text(errors="replace").splitlines() if ":" in line
        )
        name = fields.get("Model", "").strip()
        if name:
            found.append(
                Device(
                    vendor=Vendor.NVIDIA,
                    name=name if name.startswith("NVIDIA") else f"NVIDIA {name}",
                    pci_slot=information.parent.name,
                )
            )
    return tuple(found)


def from_cuda() -> tuple[Device, ...]:
    """Devices as libcuda knows them, with its INTEGRATED attribute; none where there is no libcuda or no driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        if cuda.cuInit(0) != 0:
            return ()
    except (OSError, AttributeError):
        return ()
    number = ctypes.c_int()
    if cuda.cuDeviceGetCount(ctypes.byref(number)) != 0:
        return ()
    return tuple(_ask(cuda, index) for index in range(number.value))


def _ask(cuda: ctypes.CDLL, index: int) -> Device:
    handle, name, total = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(handle), index)
    cuda.cuDeviceGetName(name, len(name), handle)
    sized = cuda.cuDeviceTotalMem_v2(ctypes.byref(total), handle) == 0
    integrated, major, minor = (_attribute(cuda, handle, which) for which in (_INTEGRATED, _MAJOR, _MINOR))
    return Device(
        vendor=Vendor.NVIDIA,
        name=name.value.decode(errors="replace") or "NVIDIA device",
        memory_bytes=total.value if sized else None,
        integrated=None if integrated is None else bool(integrated),
        compute_capability=None if major is None or minor is None else f"{major}.{minor}",
    )


def _attribute(cuda: ctypes.CDLL, handle: ctypes.c_int, which: int) -> int | None:
    value = ctypes.c_int()
    return value.value if cuda.cuDeviceGetAttribute(ctypes.byref(value), which, handle) == 0 else None


def _with(device: Device, asked: Device) -> Device:
    """nvidia-smi's view with what only libcuda knows."""
    return Device(
        vendor=device.vendor,
        name=device.name,
        memory_bytes=device.memory_bytes,
        pci_id=device.pci_id,
        pci_slot=device.pci_slot,
        integrated=asked.integrated,
        compute_capability=device.compute_capability or asked.compute_capability,
    )


def free_bytes() -> int | None:
    """Free memory of the device with the least of it, by nvidia-smi; None where it does not say."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_SMI_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    values = [int(line) << 20 for line in done.stdout.split() if line.isdigit()]
    return min(values) if values else None
