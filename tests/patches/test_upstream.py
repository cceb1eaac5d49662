"""Upstream's own tests of the fixes, from the source archive of 0.30, against 0.29 before and after."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import kvpatches
import pytest
import wheels

TESTS = "tests/v1/kv_connector/unit/offloading_connector"

# Those of the fixes' own tests that can run without a model from the network. Each fails on 0.29 as released.
FIXED_BY = {
    "test_recurrent_group_unhashed_block_does_not_truncate_load_boundary": "vllm-52807",
    "test_shared_group_mtp_serves_like_non_speculative": "vllm-52771",
    "test_annotated_eagle_group_does_not_starve_coarse_sibling": "vllm-52771",
}


def _outcomes(site: Path | None, report: Path) -> dict[str, str]:
    pytest.importorskip("torch")
    upstream = wheels.upstream_tests("0.30.0")
    here = Path(__file__).parent
    environment = os.environ | {
        "OVERLAY": str(site or ""),
        "UPSTREAM": str(upstream),
        "PYTHONPATH": os.pathsep.join(map(str, (wheels.unpacked("0.29.0"), upstream, here))),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "upstream_plugin",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            "--rootdir",
            str(upstream),
            "--confcutdir",
            str(upstream / TESTS),
            f"--junitxml={report}",
            str(upstream / TESTS / "test_scheduler.py"),
            "-k",
            " or ".join(FIXED_BY),
        ],
        env=environment,
        cwd=upstream,
        stdout=subprocess.DEVNULL,
    )
    return {
        case.attrib["name"]: "failed" if any(c.tag in ("failure", "error") for c in case) else "passed"
        for case in ET.parse(report).iter("testcase")
    }


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_upstreams_own_tests_of_the_fixes_fail_before_and_pass_after(tmp_path: Path) -> None:
    """The tests that upstream wrote with the fixes pass on 0.29 with the patches, and do not without."""
    assert _outcomes(None, tmp_path / "before.xml") == dict.fromkeys(FIXED_BY, "failed")
    site = wheels.small_site("0.29.0", tmp_path / "site")
    kvpatches.apply(site=site, options=["finished-tail"])
    assert _outcomes(site, tmp_path / "after.xml") == dict.fromkeys(FIXED_BY, "passed")
