"""Looking at a box: copied /proc and /sys trees, nvidia-smi's own text, and this machine."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from kvtier.detect import box, disks, measure, nvidia
from kvtier.detect.memory import classify
from kvtier.facts import Device, Facts, Memory, Vendor
from tests.unit.kvtier.boxes import BOXES, facts


def tree(root: Path, files: dict[str, str]) -> Path:
    """A file tree with these files (paths relative to the root)."""
    for name, text in {
        "proc/meminfo": "MemTotal: 32768000 kB\nMemAvailable: 30000000 kB\nSwapTotal: 0 kB\n",
        "proc/cpuinfo": "processor: 0\nprocessor: 1\n",
        **files,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "dev/shm").mkdir(parents=True, exist_ok=True)
    return root


def card(vendor: str, device: str, slot: str, **files: str) -> dict[str, str]:
    base = "sys/class/drm/card0"
    return {
        f"{base}/device/vendor": vendor,
        f"{base}/device/device": device,
        f"{base}/device/uevent": f"DRIVER=xe\nPCI_SLOT_NAME={slot}\n",
        **{f"{base}/{name}": text for name, text in files.items()},
    }


def seen(root: Path, smi: str | None = None) -> Facts:
    return box.look(root, smi=lambda: smi)


def test_dgx_spark_by_name_and_pci(tmp_path: Path) -> None:
    """DGX Spark: nvidia-smi shows [N/A] for the memory; the name says that it is shared."""
    found = seen(tree(tmp_path, {}), "NVIDIA GB10, 12.1, [N/A], 0x2E1210DE, 0000000F:01:00.0\n")
    assert found.memory is Memory.UNIFIED
    assert found.devices[0].memory_bytes is None
    assert found.devices[0].pci_id == "10de:2e12"
    assert found.evidence[0].decides


@pytest.mark.parametrize(
    ("line", "memory"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb, 9.0, [N/A], 0x233010DE, 00000000:1B:00.0", Memory.DISCRETE),
        ("GRID A100D-40C, 8.0, Not Supported, 0x20B510DE, 00000000:02:00.0", Memory.DISCRETE),
        ("NVIDIA GH200 480GB, 9.0, 97871, 0x234210DE, 00000009:01:00.0", Memory.DISCRETE),
        ("NVIDIA GB300, 10.3, 284208, 0x31C210DE, 00000008:01:00.0", Memory.DISCRETE),
        ("NVIDIA GeForce RTX 5090, 12.0, 32607, 0x2B8510DE, 00000000:01:00.0", Memory.DISCRETE),
        ("NVIDIA N1X, 12.1, 8128, 0x2E2A10DE, 00000000:01:00.0", Memory.UNIFIED),
    ],
)
def test_nvidia_names(tmp_path: Path, line: str, memory: Memory) -> None:
    """Neither [N/A] nor a number decides: names and PCI ids do where libcuda cannot be asked."""
    assert seen(tree(tmp_path, {}), line + "\n").memory is memory


def test_jetson_files_go_before_names(tmp_path: Path) -> None:
    """A Jetson's marker file decides even where no device is listed."""
    found = seen(tree(tmp_path, {"etc/nv_tegra_release": "# R36"}))
    assert found.memory is Memory.UNIFIED
    assert found.evidence[0].source == "/etc/nv_tegra_release"


def test_integrated_attribute_goes_before_the_name() -> None:
    """libcuda's attribute decides over a name that is not known, but not over GH200 and its kin."""

    def kind(name: str, integrated: bool) -> Memory:
        return classify([Device(vendor=Vendor.NVIDIA, name=name, integrated=integrated)], [])[0]

    assert kind("NVIDIA Future", True) is Memory.UNIFIED
    assert kind("NVIDIA Future", False) is Memory.DISCRETE
    assert kind("NVIDIA GB200", True) is Memory.DISCRETE


def test_user_goes_before_jetson_files() -> None:
    """--memory goes before everything."""
    memory, evidence = classify([], ["/etc/nv_tegra_release"], Memory.DISCRETE)
    assert memory is Memory.DISCRETE
    assert evidence[0].source == "--memory"


def test_container_without_nvidia_smi(tmp_path: Path) -> None:
    """Without nvidia-smi the driver's list in /proc names the device."""
    found = seen(
        tree(
            tmp_path,
            {"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA L40S\nIRQ: 1\n", ".dockerenv": ""},
        )
    )
    assert (found.devices[0].name, found.memory, found.container) == ("NVIDIA L40S", Memory.DISCRETE, True)


def test_intel_card_and_integrated(tmp_path: Path) -> None:
    """A B70 shows memory of its own; slot 00:02.0 does not. A link that sysfs shows is kept as seen, not believed."""
    b70 = seen(
        tree(
            tmp_path / "b70",
            card(
                "0x8086",
                "0xe223",
                "0000:03:00.0",
                **{
                    "device/tile0/physical_vram_size_bytes": str(32656 << 20),
                    "device/current_link_speed": "2.5 GT/s PCIe",
                    "device/current_link_width": "1",
                },
            ),
        )
    )
    assert (b70.memory, b70.devices[0].memory_bytes) == (Memory.DISCRETE, 32656 << 20)
    assert b70.devices[0].link == "2.5 GT/s x1"
    assert any("can be wrong" in entry.finding for entry in b70.evidence)
    igpu = seen(tree(tmp_path / "igpu", card("0x8086", "0x7d55", "0000:00:02.0")))
    assert igpu.memory is Memory.UNIFIED


@pytest.mark.parametrize("vram", [536870912, 96 << 30])
def test_strix_halo_whatever_the_carve_out(tmp_path: Path, vram: int) -> None:
    """Strix Halo is unified with a small and with a 96 GiB carve-out; MI300X is not."""
    found = seen(
        tree(
            tmp_path,
            card(
                "0x1002",
                "0x1586",
                "0000:c5:00.0",
                **{"device/mem_info_vram_total": str(vram), "device/mem_info_gtt_total": "118111600640"},
            ),
        )
    )
    assert (found.memory, found.devices[0].memory_bytes, found.devices[0].gtt_bytes) == (
        Memory.UNIFIED,
        vram,
        118111600640,
    )
    assert seen(tree(tmp_path / "x", card("0x1002", "0x74a1", "0000:05:00.0"))).memory is Memory.DISCRETE


def test_wsl_zram_and_cgroup_limit(tmp_path: Path) -> None:
    """WSL's kernel is known by its release, zram by its name, and a cgroup's limit goes before the host's RAM."""
    found = seen(
        tree(
            tmp_path,
            {
                "proc/sys/kernel/osrelease": "5.15.167.4-microsoft-standard-WSL2",
                "sys/fs/cgroup/memory.max": str(8 << 30),
                "sys/fs/cgroup/memory.current": str(1 << 30),
                "proc/swaps": "Filename Type Size Used Priority\n/dev/zram0 partition 1048576 0 100\n",
            },
        )
    )
    assert (found.wsl, found.ram_total, found.ram_available, found.zram_total) == (True, 8 << 30, 7 << 30, 1 << 30)


def test_nothing_there_is_a_cpu(tmp_path: Path) -> None:
    """No device and no marker: a CPU."""
    assert seen(tree(tmp_path, {})).memory is Memory.CPU


def test_two_sorts_of_device_take_the_card() -> None:
    """A card beside an integrated GPU decides."""
    devices = [
        Device(vendor=Vendor.INTEL, name="Intel GPU", pci_slot="0000:00:02.0"),
        Device(vendor=Vendor.NVIDIA, name="NVIDIA RTX A4000", integrated=False),
    ]
    assert classify(devices, [])[0] is Memory.DISCRETE


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at the machine that runs this test gives facts that agree with its kernel, and survive JSON."""
    found = box.look()
    assert found.ram_total > 0 and found.physical_cores >= 1
    assert found.open_files_soft == min(os.sysconf("SC_OPEN_MAX"), 2**31 - 1) or found.open_files_soft > 0
    assert msgspec.json.decode(msgspec.json.encode(found), type=Facts) == found


def test_o_direct_probe_writes_and_reads(tmp_path: Path) -> None:
    """The probe leaves nothing behind, and says False where the file system refuses (here: /proc, None: not
    writable)."""
    assert disks.takes_o_direct(tmp_path) in (True, False)
    assert list(tmp_path.iterdir()) == []
    assert disks.takes_o_direct(Path("/proc")) is None


def test_virtual_disks_do_not_turn(tmp_path: Path) -> None:
    """A hypervisor's default for `rotational` is not believed; a real drive's is."""
    root = tree(
        tmp_path,
        {
            "sys/class/block/vda/queue/rotational": "1\n",
            "sys/class/block/sda/queue/rotational": "1\n",
            "sys/class/block/sda/size": str((4 << 40) // 512),
            "mnt/x/f": "",
            "mnt/y/f": "",
        },
    )
    virtual, real = disks.look(root, "/dev/vda", "/mnt/x", "ext4"), disks.look(root, "/dev/sda", "/mnt/y", "ext4")
    assert virtual and real
    assert (virtual.rotational, real.rotational, real.total_bytes) == (None, True, 4 << 40)


def test_measured_disk_rates(tmp_path: Path) -> None:
    """The disk is measured by O_DIRECT where the file system takes it, and nothing is left behind."""
    write, read = measure.disk_rates(tmp_path, 16 << 20)
    if disks.takes_o_direct(tmp_path):
        assert write and read and write > 1e6 and read > 1e6
    assert list(tmp_path.iterdir()) == []


def test_smi_lines_that_are_not_devices_are_passed_over() -> None:
    """An error text of nvidia-smi is not a device."""
    assert nvidia.parse_smi("No devices were found\n\n") == ()


@pytest.mark.parametrize("name", BOXES)
def test_stored_evidence_is_todays(name: str) -> None:
    """Every facts file's memory kind and evidence are what the rules say of its own observations."""
    found = facts(name)
    assert classify(found.devices, found.jetson_files, found.user_memory) == (found.memory, found.evidence)
