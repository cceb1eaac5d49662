"""The adaptations against every supported LMCache: the older releases lie as overlay folders over one environment."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
OVERLAYS = REPOSITORY / ".cache/lmcache"
HERE = Path(__file__).parent
# What rests on LMCache's own code: allocation, store and retrieve, masks, lookups and pins, every adaptation's shape.
CHOSEN = (
    "test_round_trip.py::test_kv_comes_back_bit_exact_after_a_restart[torch.bfloat16-attention]",
    "test_round_trip.py::test_kv_comes_back_bit_exact_after_a_restart[torch.float16-mla]",
    "test_load_failures.py::test_the_mask_is_cut_at_the_damaged_chunk[flipped]",
    "test_lookup.py::test_a_hit_of_any_length_streams_through_a_small_ring",
    "test_lookup.py::test_pins_of_a_lookup_hold_until_they_are_given_back",
    "test_store.py::test_a_step_that_stores_more_than_the_ring_holds_works",
    "test_store.py::test_a_connector_that_raises_in_mid_store_leaks_no_slot",
    "test_beside_cpu_cache.py",
    "test_async_loading.py",
    "test_refusals.py::test_every_adaptation_knows_the_installed_lmcache",
    "test_lmcache_server_releases.py",
)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", ["0.5.4", "0.5.5"])
def test_the_plugin_works_with_an_older_lmcache(version):
    """The same tests, in a process whose LMCache is that release."""
    overlay = OVERLAYS / version
    if not (overlay / "lmcache").is_dir():
        pytest.skip(f"LMCache {version} is not in {OVERLAYS}: `make overlays` fetches it")
    paths = [str(overlay), str(REPOSITORY), str(REPOSITORY / "configs"), *os.environ.get("PYTHONPATH", "").split(":")]
    env = os.environ | {"PYTHONPATH": ":".join(path for path in paths if path), "KVTIER_EXPECTED_LMCACHE": version}
    command = [sys.executable, "-m", "pytest", "-q", "--show-capture=no", "-p", "no:cacheprovider"]
    command += [
        str(HERE / chosen) for chosen in (*CHOSEN, "test_lmcache_versions.py::test_this_is_the_expected_lmcache")
    ]
    done = subprocess.run(command, env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def test_this_is_the_expected_lmcache():
    """What is imported is what is being tested: a supported release, the overlay's where there is one."""
    import lmcache

    from lmcache_nvme_backend.doors.lmcache_compat import lmcache_version

    expected = os.environ.get("KVTIER_EXPECTED_LMCACHE") or importlib.metadata.version("lmcache")
    assert lmcache_version() == expected
    assert expected in ("0.5.4", "0.5.5", "0.5.6")
    if "KVTIER_EXPECTED_LMCACHE" in os.environ:
        assert f"/{expected}/" in str(lmcache.__file__)
