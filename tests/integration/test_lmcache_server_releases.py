"""Which releases of LMCache the door of its server works with."""

from __future__ import annotations

import pytest

pytest.importorskip("lmcache")

from lmcache_nvme_backend.doors.lmcache_compat import lmcache_version
from lmcache_nvme_backend.doors.mp.adapter import NvmeL2Adapter
from lmcache_nvme_backend.errors import ConfigError


def test_a_release_that_publishes_failed_loads_is_refused(tmp_path):
    """0.5.4 and 0.5.5 make what a failed load left in a buffer visible, and store it: the start ends, by name."""
    if lmcache_version() in ("0.5.4", "0.5.5"):
        with pytest.raises(ConfigError, match=lmcache_version()):
            NvmeL2Adapter({"root_dir": str(tmp_path), "quota_gib": 1})
    else:
        NvmeL2Adapter({"root_dir": str(tmp_path), "quota_gib": 1}).close()
