"""Discrete or unified: the order in which evidence counts.

The order is the point. Each later source is right less often, and the cheap ones are wrong on known boxes: a memory
size
of ``[N/A]`` shows on MIG parents and vGPUs (discrete) and on DGX Spark (unified), and a plain number shows on the N1X
(unified).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvtier.facts import Device, Evidence, Memory, Vendor
from kvtier.units import gib

JETSON_FILES = ("/etc/nv_tegra_release", "/sys/class/tegra-firmware")

# Coherent with the host over NVLink-C2C, but with HBM of their own.
_COHERENT_BUT_SEPARATE = re.compile(r"\b(GH200|GB200|GB300)\b")
# Parts whose name alone says that they share the host's memory.
_INTEGRATED_NAMES = re.compile(r"\b(GB10|Thor|Orin|Xavier|N1X|RTX Spark)\b|nvgpu", re.IGNORECASE)
# DGX Spark's PCI range, and the AMD parts that share one DRAM.
_SPARK_PCI = range(0x2E00, 0x2E40)
_AMD_APU_PCI = {"1002:1586": "Strix Halo", "1002:150e": "Strix Point", "1002:15bf": "Phoenix"}
_AMD_APU_NAMES = re.compile(r"MI300A|Strix|Radeon 80[56]0S|Radeon 8[89]0M|Radeon 7[68]0M", re.IGNORECASE)


def classify(
    devices: Sequence[Device], jetson_files: Sequence[str], user_says: Memory | None = None
) -> tuple[Memory, tuple[Evidence, ...]]:
    """The memory kind of a box and the evidence for it; the evidence that decided comes first.

    With several devices the first one decides (vLLM takes device 0), except that an integrated helper GPU beside a
    discrete card is passed over.
    """
    if user_says is not None:
        return user_says, (_decided("--memory", f"you said {user_says.value}"),)
    if not devices and not jetson_files:
        return Memory.CPU, (_decided("devices", "no accelerator found"),)
    if jetson_files:
        return Memory.UNIFIED, (_decided(jetson_files[0], "a Jetson: CPU and GPU share one DRAM"), *_also(devices))
    ruled = [(device, *rule_one(device)) for device in devices]
    discrete = [entry for entry in ruled if entry[1] is Memory.DISCRETE]
    _device, kind, evidence = (discrete or ruled)[0]
    return kind, (evidence, *_also(devices))


def rule_one(device: Device) -> tuple[Memory, Evidence]:
    """The memory kind of one device and the finding that decides it."""
    if device.vendor is Vendor.NVIDIA:
        return _nvidia(device)
    if device.vendor is Vendor.AMD:
        return _amd(device)
    return _intel(device)


def main_devices(devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices an engine would run on: the discrete ones where there are any, else all."""
    discrete = tuple(device for device in devices if rule_one(device)[0] is Memory.DISCRETE)
    return discrete or tuple(devices)


def _nvidia(device: Device) -> tuple[Memory, Evidence]:
    if match := _COHERENT_BUT_SEPARATE.search(device.name):
        return Memory.DISCRETE, _decided("name", f"{match[0]} is coherent with the host but has HBM of its own")
    if device.integrated is not None:
        kind = Memory.UNIFIED if device.integrated else Memory.DISCRETE
        return kind, _decided("libcuda", f"CU_DEVICE_ATTRIBUTE_INTEGRATED = {int(device.integrated)}")
    if match := _INTEGRATED_NAMES.search(device.name):
        return Memory.UNIFIED, _decided("nvidia-smi", f"the name {device.name!r} is of a part with shared memory")
    if device.pci_id and device.pci_id.startswith("10de:") and int(device.pci_id[5:], 16) in _SPARK_PCI:
        return Memory.UNIFIED, _decided("sysfs", f"PCI id {device.pci_id} is in DGX Spark's range")
    return Memory.DISCRETE, _decided("nvidia-smi", f"{device.name!r} is not a part known to share memory")


def _amd(device: Device) -> tuple[Memory, Evidence]:
    known = _AMD_APU_PCI.get(device.pci_id or "")
    if known or _AMD_APU_NAMES.search(device.name):
        carve_out = (
            ""
            if device.memory_bytes is None
            else (f"; its {gib(device.memory_bytes)} of VRAM are a BIOS carve-out of the same DRAM")
        )
        return Memory.UNIFIED, _decided("sysfs", f"{known or device.name} shares the host's DRAM{carve_out}")
    return Memory.DISCRETE, _decided("sysfs", f"{device.name!r} ({device.pci_id}) has VRAM of its own")


def _intel(device: Device) -> tuple[Memory, Evidence]:
    if device.own_memory_files:
        return Memory.DISCRETE, _decided("sysfs", f"{device.own_memory_files[0]} exists only with memory of its own")
    if device.pci_slot and device.pci_slot.endswith("00:02.0"):
        return Memory.UNIFIED, _decided("sysfs", "PCI slot 00:02.0 is Intel's integrated GPU")
    if re.search(r"Arc\(TM\) (Pro )?[AB]\d+", device.name):
        return Memory.DISCRETE, _decided("name", f"{device.name!r} is a card")
    return Memory.UNIFIED, _decided("sysfs", "no local-memory file and no known card name")


def _decided(source: str, finding: str) -> Evidence:
    return Evidence(source=source, finding=finding, decides=True)


def _also(devices: Sequence[Device]) -> tuple[Evidence, ...]:
    """What was seen but does not decide, so that a person can weigh it."""
    seen = []
    for device in devices:
        shown = "[N/A]" if device.memory_bytes is None else gib(device.memory_bytes)
        seen.append(Evidence(source="driver", finding=f"{device.name}: memory shown as {shown} (proves nothing alone)"))
        if device.link:
            seen.append(Evidence(source="sysfs", finding=f"{device.name}: link shown as {device.link} (can be wrong)"))
    return tuple(seen)
