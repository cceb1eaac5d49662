"""This project's NVMe tier through vLLM's own offloading: no CPU tier, and hybrid models."""

from __future__ import annotations

from kvtier.doors import native_transfer
from kvtier.facts import Memory, Vendor
from kvtier.plan import disk
from kvtier.plan.draft import Draft
from kvtier.plan.result import Decision, Effect
from kvtier.units import GIB, MIB, gib

STAGING = 256 * MIB
"""A rank's ring, the door's own default."""
FIRST = (0, 30)
"""Before it a load that fails cannot be reported, and ends the engine."""
_LAST_RUN = (0, 32)


def offered(draft: Draft) -> bool:
    """Whether the target release can run it, on one host."""
    return draft.target_at_least(*FIRST) and not draft.serving_nodes


def why_not(draft: Draft) -> str:
    """The reason, where it is not offered."""
    if draft.serving_nodes:
        return "several hosts: its scheduler's side looks chunks up on the first host's disk alone"
    return (
        f"vLLM {draft.target}: a load that fails can be reported to the engine since "
        f"{'.'.join(map(str, FIRST))} only, and would end it before"
    )


def nvme(draft: Draft) -> None:
    """Straight to NVMe and back, asynchronously, with a quota, checksums and what a restart finds."""
    place = disk.choose(draft)
    draft.decision = Decision.NVME_SPEC
    draft.connector = native_transfer(place.path, place.size // GIB, mixed=draft.geometry.mixed)
    draft.env["PYTHONHASHSEED"] = "0"
    because = "a hybrid model, which LMCache's in-process connector cannot run: " if draft.geometry.hybrid else ""
    draft.say(
        "nvme-spec",
        Effect.CHOSE,
        f"{because}this project's tier as vLLM's own offloading spec: {gib(place.size)} under {place.path}, no CPU "
        f"tier, and {gib(STAGING)} of staging a rank as the only host memory. The quota is the root's, and a restart "
        "finds the chunks.",
    )
    draft.say(
        "recompute-on-failed-load",
        Effect.CHANGED,
        "kv_load_failure_policy: recompute, which this door insists on: the default, fail, ends a request.",
    )
    draft.say(
        "hash-seed",
        Effect.CHANGED,
        "PYTHONHASHSEED=0: blocks are named by hashes, and with xxhash a random seed gives every process its own.",
    )
    _remarks(draft)
    draft.add_tier("nvme", place.size, place.path)


def _remarks(draft: Draft) -> None:
    if draft.target_at_least(_LAST_RUN[0], _LAST_RUN[1] + 1):
        draft.say(
            "nvme-spec-version",
            Effect.WARNED,
            f"vLLM {draft.target} is newer than {'.'.join(map(str, _LAST_RUN))}, the last one that this door has been "
            "run with; it refuses code that it does not know.",
        )
    if draft.memory is not Memory.CPU:
        vendor = "CUDA" if draft.vendor is Vendor.NVIDIA else "this device"
        draft.say(
            "nvme-spec-on-device",
            Effect.WARNED,
            f"on {vendor} the copies between device and staging go by torch's streams and events; this project has run "
            "them on a CPU only.",
        )
