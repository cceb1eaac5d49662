"""Checks of the box alone, without a model."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from kvtier.detect import software
from kvtier.doctor.checks import Check, failed, judged, passed, warned
from kvtier.facts import Facts, Memory
from kvtier.launch import sweep
from kvtier.units import gib, version_tuple

_OPEN_FILES = 65536
"""One file a chunk and thread, the engine's sockets, and a proxy's connections; 1024 runs out under load."""
_OLDEST, _NEWEST = (0, 24, 0), (0, 33, 0)
"""Releases whose flags and metrics these rules were run or read against."""


def box_checks(facts: Facts) -> list[Check]:
    """Device, versions, limits, leaked maps, swap."""
    return [_memory(facts), _vllm(facts), *_open_files(facts), *_allocator(facts), *_leaks(), *_swap(facts)]


def plugin_check(environment: Mapping[str, str]) -> Check:
    """Whether vLLM will run this project's plugin: its entry point is installed and not filtered out."""
    from importlib.metadata import entry_points

    found = [point for point in entry_points(group="vllm.general_plugins") if point.name == "lmcache_nvme_backend"]
    if not found:
        return failed(
            "plugin",
            "lmcache-nvme-backend is not installed in this environment: vLLM will not run its plugin",
            "pip install .   # in a checkout of lmcache-nvme-backend",
        )
    allowed = environment.get("VLLM_PLUGINS")
    if allowed is not None and "lmcache_nvme_backend" not in allowed.split(","):
        return failed(
            "plugin",
            f"VLLM_PLUGINS={allowed} filters the plugin out",
            "export VLLM_PLUGINS=$VLLM_PLUGINS,lmcache_nvme_backend",
        )
    return passed("plugin", "vLLM will run lmcache-nvme-backend's plugin")


def lmcache_check(facts: Facts) -> Check:
    """Whether LMCache is there, in a tested version."""
    version = facts.versions.lmcache
    if version is None:
        return failed("lmcache", "LMCache is not installed", "pip install 'lmcache>=0.5.4,<0.5.7'")
    good = (0, 5, 4) <= version_tuple(version) < (0, 5, 7)
    return judged(
        "lmcache",
        good,
        f"LMCache {version}",
        f"LMCache {version} is outside the tested 0.5.4 to 0.5.6",
        "pip install 'lmcache>=0.5.4,<0.5.7'",
        hard=False,
    )


def patch_states() -> dict[str, str]:
    """What kvpatches says of the installed vLLM."""
    return software.patch_states()


def _memory(facts: Facts) -> Check:
    decided = next((entry for entry in facts.evidence if entry.decides), None)
    return passed("memory", f"{facts.memory.value}: {decided.finding if decided else 'no evidence'}")


def _vllm(facts: Facts) -> Check:
    version = facts.versions.vllm
    if version is None:
        return failed("vllm", "vLLM is not installed in this environment", "pip install vllm")
    good = _OLDEST <= version_tuple(version) < _NEWEST
    return judged(
        "vllm",
        good,
        f"vLLM {version} ({facts.versions.vllm_distribution})",
        f"vLLM {version} is outside the tested 0.24 to 0.32",
        "pip install 'vllm>=0.29,<0.33'",
        hard=False,
    )


def _open_files(facts: Facts) -> list[Check]:
    soft, hard = facts.open_files_soft, facts.open_files_hard
    fix = f"ulimit -n {min(_OPEN_FILES, hard)}"
    return [
        judged(
            "open-files",
            soft >= min(_OPEN_FILES, hard) // 4,
            f"{soft} file descriptors",
            f"only {soft} file descriptors",
            fix,
            hard=False,
        )
    ]


def _allocator(facts: Facts) -> list[Check]:
    names = [
        name
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        if "expandable_segments:true" in facts.environment.get(name, "").lower().replace(" ", "")
    ]
    return [
        failed(
            "expandable-segments",
            f"{name} holds expandable_segments:True: no KV connector runs with it",
            f"unset {name}",
        )
        for name in names
    ]


def _leaks() -> list[Check]:
    found = sweep.leaks()
    if not found:
        return [passed("leaked-maps", "no leaked offload maps in /dev/shm")]
    size = gib(sum(leak.bytes for leak in found))
    return [
        warned(
            "leaked-maps",
            f"{len(found)} offload maps that no process holds take {size} of /dev/shm",
            shlex.join(["rm", *(str(leak.path) for leak in found)]),
        )
    ]


def _swap(facts: Facts) -> list[Check]:
    if facts.memory is not Memory.UNIFIED or not facts.swap_total:
        return []
    return [
        warned(
            "swap",
            f"{gib(facts.swap_total)} of swap on unified memory: the box crawls instead of failing",
            "swapoff -a",
        )
    ]
