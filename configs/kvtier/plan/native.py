"""vLLM's own offload: host RAM, RAM and NVMe, or its disk-only connector."""

from __future__ import annotations

from typing import Any

from kvtier.facts import Vendor
from kvtier.plan import disk, memory
from kvtier.plan.draft import Draft
from kvtier.plan.result import Decision, Effect
from kvtier.units import GIB, gib

FIRST_TIERING = (0, 23)
"""The oldest release looked at has it; the others are where released wheels first show the name."""
_FIRST_BLOCKS_PER_CHUNK = (0, 26)
_FIRST_DISK_CONNECTOR = (0, 28)
_FS_THREADS_LEAST, _FS_THREADS_MOST = 4, 16
"""vLLM's default is 16 + 16 whatever the box has; threads beyond the cores only wait for each other."""
_DISK_BUFFER_SLOTS = 4
"""Pinned blocks in each direction; the default of 2 leaves the drive idle while a block is copied."""


def ram(draft: Draft) -> None:
    """Host RAM behind a discrete device: the two flags that vLLM has for it."""
    size = memory.ram_tier(draft, tiering=False)
    draft.decision = Decision.NATIVE_RAM
    draft.say(
        "discrete-native-ram",
        Effect.CHOSE,
        f"the device has memory of its own, so host RAM is a tier: {gib(size)}, over all ranks, written through as "
        "blocks are computed.",
    )
    draft.args += ["--kv-offloading-size", str(size // GIB), "--kv-offloading-backend", "native"]
    draft.say(
        "one-size-flag",
        Effect.NOTED,
        "--kv-offloading-size overwrites the connector of any --kv-transfer-config, so only the one is emitted here.",
    )
    _groups_note(draft)
    _seed(draft)
    draft.add_tier("ram", size)


def ram_and_nvme(draft: Draft) -> None:
    """Host RAM, and behind it files: the tiering spec with an fs tier."""
    if not draft.target_at_least(*FIRST_TIERING):
        raise draft.refuse(
            "tiering-needs-newer-vllm",
            f"vLLM {draft.target} has no tiering spec: RAM and NVMe together "
            f"need {'.'.join(map(str, FIRST_TIERING))}. Leave --nvme out for the RAM tier alone.",
        )
    size = memory.ram_tier(draft, tiering=True)
    place = disk.choose(draft)
    disk.cap(draft, place)
    threads = min(max(draft.facts.physical_cores, _FS_THREADS_LEAST), _FS_THREADS_MOST)
    extra: dict[str, Any] = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": size}
    if draft.geometry.mixed:
        if draft.target_at_least(*_FIRST_BLOCKS_PER_CHUNK):
            extra["blocks_per_chunk"] = 1
            draft.say(
                "blocks-per-chunk",
                Effect.CHANGED,
                "blocks_per_chunk: 1, because layers of several sorts have blocks of several sizes, and block_size "
                "asserts on those.",
            )
        else:
            draft.say(
                "blocks-per-chunk",
                Effect.NOTED,
                f"neither block_size nor blocks_per_chunk: vLLM {draft.target} lacks the latter, and the former "
                "asserts on layers of several sorts.",
            )
    extra["secondary_tiers"] = [
        {"type": "fs", "root_dir": place.path, "n_read_threads": threads, "n_write_threads": threads}
    ]
    draft.decision = Decision.NATIVE_RAM_NVME
    draft.say(
        "discrete-native-ram-nvme",
        Effect.CHOSE,
        f"RAM of {gib(size)} takes what is computed and passes it on to files "
        f"under {place.path}; a restart finds the files.",
    )
    draft.say(
        "fs-threads",
        Effect.CHANGED,
        f"{threads} + {threads} I/O threads: one a physical core, at least "
        f"{_FS_THREADS_LEAST}, at most {_FS_THREADS_MOST}.",
    )
    draft.connector = _connector("OffloadingConnector", extra)
    _seed(draft)
    _recompute(draft)
    draft.add_tier("ram", size)
    draft.add_tier("nvme", place.size, place.path)


def disk_only(draft: Draft) -> None:
    """vLLM's own disk connector: no RAM, a quota, hybrid models; nothing survives a restart."""
    place = disk.choose(draft)
    slots = _DISK_BUFFER_SLOTS
    draft.decision = Decision.NATIVE_NVME
    draft.connector = _connector(
        "SimpleCPUOffloadConnector",
        {
            "kv_offload_backend": "disk",
            "disk_path": f"{place.path}/vllm-offload",
            "disk_capacity_bytes": place.size // draft.world_size,
            "disk_buffer_slots": slots,
        },
    )
    draft.say(
        "unified-hybrid-native-nvme",
        Effect.CHOSE,
        "a hybrid model on unified memory: LMCache's in-process connector cannot run it, a RAM tier is refused, so "
        "vLLM's disk connector holds the KV. It keeps a quota and nothing over a restart.",
    )
    _seed(draft)
    _recompute(draft)
    draft.say(
        "disk-capacity-per-rank",
        Effect.NOTED,
        f"disk_capacity_bytes is a rank's: {gib(place.size)} over "
        f"{draft.world_size} rank(s); {slots} pinned blocks in each direction are its only host memory.",
    )
    draft.add_tier("nvme", place.size, place.path)


def has_disk_connector(draft: Draft) -> bool:
    """Since 0.28, and only where its copies run: it drives CUDA's batched copies itself."""
    return draft.target_at_least(*_FIRST_DISK_CONNECTOR) and draft.vendor is Vendor.NVIDIA


def _connector(name: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _groups_note(draft: Draft) -> None:
    if draft.geometry.mixed:
        draft.say(
            "blocks-per-chunk",
            Effect.NOTED,
            "layers of several sorts: the size flag leaves chunks at one block each, which is what they need; "
            "block_size would assert.",
        )


def _seed(draft: Draft) -> None:
    draft.env["PYTHONHASHSEED"] = "0"
    draft.say(
        "hash-seed",
        Effect.CHANGED,
        "PYTHONHASHSEED=0: blocks are named by hashes, and up to 0.28 (and with xxhash in every release) a random "
        "seed gives every process its own names, so that a restart finds no file.",
    )


def _recompute(draft: Draft) -> None:
    draft.say(
        "recompute-on-failed-load",
        Effect.CHANGED,
        "kv_load_failure_policy: recompute, because the default, fail, ends a request whose KV could not be loaded.",
    )
