"""The ring of buffers that chunks pass through between the device and the drive."""

from lmcache_nvme_backend.staging.memory import StagingMemory
from lmcache_nvme_backend.staging.ring import Slot, StagingRing

__all__ = ["Slot", "StagingMemory", "StagingRing"]
