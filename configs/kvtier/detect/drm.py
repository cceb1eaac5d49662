"""AMD and Intel devices, from sysfs alone."""

from __future__ import annotations

import os
from pathlib import Path

from kvtier.facts import Device, Vendor

_AMD, _INTEL = "0x1002", "0x8086"
_AMD_NAMES = {
    "1002:1586": "Radeon 8060S Graphics",
    "1002:74a0": "AMD Instinct MI300A",
    "1002:74a1": "AMD Instinct MI300X",
    "1002:150e": "Radeon 890M Graphics",
    "1002:15bf": "Radeon 780M Graphics",
}
_INTEL_NAMES = {
    "8086:e223": "Intel(R) Arc(TM) Pro B70 Graphics",
    "8086:e20b": "Intel(R) Arc(TM) B580 Graphics",
    "8086:7d55": "Intel(R) Arc(TM) Graphics",
}
_OWN_MEMORY = (
    "tile*/physical_vram_size_bytes",
    "device/tile*/physical_vram_size_bytes",
    "lmem_total_bytes",
    "device/lmem_total_bytes",
)


def devices(root: Path) -> tuple[Device, ...]:
    """Every AMD and Intel GPU under /sys/class/drm."""
    found = []
    for card in sorted((root / "sys/class/drm").glob("card[0-9]*")):
        if "-" in card.name:  # a connector, not a card
            continue
        vendor = _text(card / "device/vendor")
        if vendor == _AMD:
            found.append(_amd(card))
        elif vendor == _INTEL:
            found.append(_intel(card))
    return tuple(found)


def _amd(card: Path) -> Device:
    identity = _identity(card)
    name = _text(card / "device/product_name") or _AMD_NAMES.get(identity, f"AMD GPU {identity}")
    return Device(
        vendor=Vendor.AMD,
        name=name,
        pci_id=identity,
        pci_slot=_slot(card),
        memory_bytes=_number(card / "device/mem_info_vram_total"),
        gtt_bytes=_number(card / "device/mem_info_gtt_total"),
        link=_link(card),
    )


def _intel(card: Path) -> Device:
    identity = _identity(card)
    own = [path for pattern in _OWN_MEMORY for path in sorted(card.glob(pattern))]
    return Device(
        vendor=Vendor.INTEL,
        name=_INTEL_NAMES.get(identity, f"Intel GPU {identity}"),
        pci_id=identity,
        pci_slot=_slot(card),
        own_memory_files=tuple(str(path.relative_to(card)) for path in own),
        memory_bytes=sum(_number(path) or 0 for path in own) or None,
        link=_link(card),
    )


def _identity(card: Path) -> str:
    return f"{_text(card / 'device/vendor')[2:]}:{_text(card / 'device/device')[2:]}"


def _slot(card: Path) -> str | None:
    for line in _text(card / "device/uevent").splitlines():
        if line.startswith("PCI_SLOT_NAME="):
            return line.partition("=")[2]
    target = Path(os.path.realpath(card / "device")).name
    return target if target.count(":") == 2 else None


def _link(card: Path) -> str | None:
    speed, width = _text(card / "device/current_link_speed"), _text(card / "device/current_link_width")
    return f"{speed.removesuffix(' PCIe')} x{width}" if speed and width else None


def _number(path: Path) -> int | None:
    text = _text(path)
    try:
        return int(text, 0) if text else None
    except ValueError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def free_bytes(root: Path) -> int | None:
    """Free VRAM of the AMD device with the least of it; None without one. (Intel's drivers do not tell.)"""
    found = []
    for card in (root / "sys/class/drm").glob("card[0-9]*"):
        total, used = (_number(card / f"device/mem_info_vram_{name}") for name in ("total", "used"))
        if total and used is not None:
            found.append(total - used)
    return min(found, default=None)
