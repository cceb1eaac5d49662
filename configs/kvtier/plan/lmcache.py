"""This project's NVMe tier, as a storage plugin of LMCache."""

from __future__ import annotations

from typing import Any

from kvtier.facts import Memory, Vendor
from kvtier.plan import disk, hosts
from kvtier.plan.draft import Draft
from kvtier.plan.estimate import min_retrieve_tokens
from kvtier.plan.result import Decision, Effect
from kvtier.units import GIB, MIB, gib

CHUNK_TOKENS = 256
DEFAULT_STAGING = 256 * MIB
"""The backend's own default for nvme.staging_mib."""
_LEAST_CHUNKS_STAGED = 4
"""Two to load by, two to write behind."""
_TESTED_LMCACHE = ("0.5.4", "0.5.5", "0.5.6")


def nvme(draft: Draft) -> None:
    """Chunks of 256 tokens on NVMe, no CPU pool."""
    place = disk.choose(draft)
    if draft.serving_nodes and draft.memory is not Memory.UNIFIED:
        draft.say("several-hosts", Effect.NOTED, "each host keeps its own ranks' chunks on its own disk.")
    staging = staging_bytes(draft)
    if staging != DEFAULT_STAGING:
        draft.say(
            "staging-for-large-chunks",
            Effect.CHANGED,
            f"nvme.staging_mib {staging // MIB}: a chunk of {CHUNK_TOKENS} tokens is "
            f"{_chunk_bytes(draft) / MIB:.0f} MiB a rank here, and the ring should hold {_LEAST_CHUNKS_STAGED}.",
        )
    draft.decision = Decision.LMCACHE_NVME
    least = min_retrieve_tokens(draft)
    draft.lmcache = config(draft, place.path, place.size, staging, least)
    draft.connector = {
        "kv_connector": "LMCacheConnectorV1",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    draft.env |= {"LMCACHE_CONFIG_FILE": draft.wishes.lmcache_file, "PYTHONHASHSEED": "0"}
    draft.say(
        "lmcache-disk-only",
        Effect.CHOSE,
        f"this project's tier: {gib(place.size)} under {place.path}, local_cpu false, max_local_cpu_size 0, and "
        f"{gib(staging)} of staging a rank as the only host memory. The quota is enforced by the backend, and a "
        "restart finds the chunks.",
    )
    draft.say(
        "recompute-on-failed-load",
        Effect.CHANGED,
        "kv_load_failure_policy: recompute, because the default, fail, ends a request whose KV could not be loaded.",
    )
    draft.say(
        "hash-seed",
        Effect.CHANGED,
        "PYTHONHASHSEED=0 and sha256_cbor: chunk keys are equal after a restart and on every rank.",
    )
    _remarks(draft)
    if not draft.serving_nodes:
        draft.add_tier("nvme", place.size, place.path)
        return
    hosts.split(draft, lambda path: config(draft, path, place.size, staging, least), place)


def config(draft: Draft, path: str, quota: int, staging: int, min_retrieve: int = 0) -> dict[str, Any]:
    """The LMCache configuration, as its YAML file holds it."""
    extra: dict[str, Any] = {
        "storage_plugin.nvme.module_path": "lmcache_nvme_backend",
        "storage_plugin.nvme.class_name": "NvmeBackend",
        "nvme.path": path,
        "nvme.quota_gib": quota // GIB,
    }
    if staging != DEFAULT_STAGING:
        extra["nvme.staging_mib"] = staging // MIB
    return {
        "chunk_size": CHUNK_TOKENS,
        "local_cpu": False,
        "max_local_cpu_size": 0,
        "pre_caching_hash_algorithm": "sha256_cbor",
        **({"min_retrieve_tokens": min_retrieve} if min_retrieve else {}),
        "storage_plugins": ["nvme"],
        "extra_config": extra,
    }


def staging_bytes(draft: Draft) -> int:
    """A rank's staging ring: the backend's default, or more where four of the model's chunks do not fit in that."""
    needed = _LEAST_CHUNKS_STAGED * _chunk_bytes(draft)
    if needed <= DEFAULT_STAGING:
        return DEFAULT_STAGING
    return -(-needed // (64 * MIB)) * 64 * MIB


def _chunk_bytes(draft: Draft) -> int:
    """Bytes of one chunk on one rank."""
    split = 1 if draft.geometry.attention == "MLA" else draft.tensor_parallel
    return CHUNK_TOKENS * draft.stored_bytes_per_token // split


def _remarks(draft: Draft) -> None:
    if draft.wishes.lora:
        draft.say(
            "lora-needs-plugin",
            Effect.NOTED,
            "LoRA: LMCache's own keys leave the adapter out; this project's vLLM plugin puts it in, so the plugin must "
            "be loaded (VLLM_PLUGINS must not filter lmcache_nvme_backend out).",
        )
    installed = draft.facts.versions.lmcache
    if installed and installed not in _TESTED_LMCACHE:
        draft.say(
            "lmcache-version",
            Effect.WARNED,
            f"LMCache {installed} is not one of {', '.join(_TESTED_LMCACHE)}, which the backend is tested against; it "
            "refuses code that it does not know.",
        )
    if draft.vendor is Vendor.AMD:
        draft.say(
            "lmcache-rocm",
            Effect.WARNED,
            "LMCache's wheels are built for CUDA: on ROCm it has to be built from source, and this project has not "
            "run it there.",
        )
    if draft.geometry.windowed:
        draft.say(
            "sliding-window-as-full",
            Effect.WARNED,
            "LMCache's in-process connector needs one sort of KV layer: vLLM keeps "
            f"the {draft.geometry.layers.window} sliding layers in full for it, so the pool holds fewer tokens.",
        )
    if draft.wishes.pp > 1:
        draft.say(
            "pipeline-parallel",
            Effect.WARNED,
            "each pipeline stage keeps its own layers' chunks; this project has not run that combination.",
        )
    if draft.memory is Memory.CPU:
        draft.say(
            "cpu-connector",
            Effect.NOTED,
            "LMCache has no connector for vLLM on a CPU; this project's one is armed by its vLLM plugin.",
        )
