"""What the plugin hands to its exporter."""

import pytest

from lmcache_nvme_backend.metrics import METRICS


@pytest.mark.parametrize(("cpu_gib", "pool_bytes"), [(0, 0), (0.125, 1 << 27)])
def test_every_declared_metric_has_a_value_and_the_cpu_pool_is_lmcaches(lmcache, cpu_gib, pool_bytes):
    """A metric that is declared and never set would be missing on /metrics; the pool is the one LMCache allocated."""
    values = lmcache(cpu_gib=cpu_gib).backend._values()
    assert set(values) == {metric.name for metric in METRICS}
    assert values["kvtier_lmcache_cpu_pool_bytes"] == pool_bytes
    assert (values["kvtier_staging_bytes"] > 0) == (cpu_gib == 0)
