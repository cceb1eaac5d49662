"""This rank's staging ring, pinned where the device wants it pinned, without LMCache."""

from __future__ import annotations

from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.settings import NvmeSettings
from lmcache_nvme_backend.staging import StagingMemory, StagingRing


def open_ring(settings: NvmeSettings, chunk_bytes: int, device: str) -> StagingRing:
    """Slots for chunks of `chunk_bytes`. Raises `ConfigError` where two do not fit or the device cannot pin them.

    The settings in the messages have the names of `NvmeSettings`.
    """
    ring = StagingRing(_memory(settings.staging_bytes, device), chunk_bytes, lambda nbytes: _memory(nbytes, device))
    if ring.slots < 2:
        ring.close()
        raise ConfigError(
            "nvme.staging_mib", f"{settings.staging_mib} MiB with chunks of {chunk_bytes / 2**20:.1f} MiB",
            "at least two chunks",
            f"Set it to {-(-2 * ring.slot_bytes // 2**20)} or more, or lower blocks_per_chunk.",
        )  # fmt: skip
    if device != "cpu" and not ring.pinned:
        ring.close()
        raise ConfigError(
            "nvme.staging_mib", f"{settings.staging_mib} MiB that {device} cannot pin",
            "host memory that can be registered with the device",
            "Lower it, or raise the locked-memory limit (ulimit -l).",
        )  # fmt: skip
    return ring


def _memory(nbytes: int, device: str) -> StagingMemory:
    if device == "cpu":
        return StagingMemory(nbytes)
    return StagingMemory(nbytes, _pin, _unpin)


def _pin(address: int, nbytes: int) -> bool:
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cuda_alike():
        return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0
    if current_platform.is_xpu() and hasattr(torch.ops._C, "xpu_host_register"):
        return bool(torch.ops._C.xpu_host_register(address, nbytes))
    return False


def _unpin(address: int) -> bool:
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cuda_alike():
        return int(torch.cuda.cudart().cudaHostUnregister(address)) == 0
    return bool(torch.ops._C.xpu_host_unregister(address))
