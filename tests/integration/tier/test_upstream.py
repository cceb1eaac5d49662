"""vLLM's own tests of a secondary tier and of the tiering manager, from its source archive, on `NvmeTier`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests import wheels

pytest.importorskip("vllm")

VERSION = "0.32.0"
FOLDER = "tests/v1/kv_offload/tiering"

# What is said there of one implementation and not of every tier.
NOT_OURS = {
    "test_tiering_offloading": {
        "test_basic_store_and_lookup",  # a miss becomes a hit within one request, by hand
        "test_reset_cache_drains_all_tiers",  # counts calls, of which the example's stand-in makes more
        "test_tier_filter_skips_filtered_secondary[non_matching_medium]",  # a tier without a medium
        "test_tier_filter_allows_matching_secondary[explicit_cpu]",  # the same
    },
    "test_fs_tier": {
        "test_invalid_path_raises_at_construction",  # it does, but not as OSError
        "test_shutdown_discards_pending_tasks",  # its thread pool's inside
        "test_store_load_roundtrip_without_o_direct",  # a private switch
        "test_failed_load_corrects_verdict_and_removes_corrupt_file[True]",  # its lookups' inside
        "test_failed_load_corrects_verdict_and_removes_corrupt_file[False]",
        "test_batched_partial_load_failure_keeps_loaded_blocks[True]",
        "test_batched_partial_load_failure_keeps_loaded_blocks[False]",
        "test_batched_load_first_block_fails_marks_whole_batch[True]",  # it gives up at the first; NvmeTier does not
        "test_batched_load_first_block_fails_marks_whole_batch[False]",
        "test_transient_load_failure_leaves_file[True]",  # a symlink in a chunk's place is a bad chunk here
        "test_transient_load_failure_leaves_file[False]",
        "test_store_event_uses_configured_locality[None-None]",  # KV events: a tier that evicts would tell half
        "test_store_event_uses_configured_locality[REMOTE-Locality.REMOTE]",
        "test_events_disabled_by_default",
        "test_events_require_global_kv_events_flag",
        "test_cascade_store_emits_fs_event_through_tiering_manager",
        "test_successful_store_emits_stored_event",
        "test_load_job_emits_no_event",
        "test_mixed_job_results_emit_event_only_for_successful_job",
        "test_partially_failed_store_emits_no_event",
        "test_fs_tier_cross_tp_round_trip",  # rows that several topologies share
    },
}


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NOT_OURS)
def test_upstreams_own_tests_pass_on_this_tier(tmp_path: Path, name: str) -> None:
    """All that is said of a tier, or of the manager around one, and not of vLLM's own implementations."""
    shutil.copytree(wheels.upstream_tests(VERSION) / "tests", tmp_path / "tests")
    here, root, report = Path(__file__).parent, Path(__file__).parents[3], tmp_path / "report.xml"
    places = (root, root / "configs", root / "patches", here)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, places)), "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-p", "upstream_tier", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(tmp_path), "--confcutdir", str(tmp_path / FOLDER), f"--junitxml={report}"]
    done = subprocess.run(
        [*command, f"{FOLDER}/{name}.py"], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert report.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    cases = list(ET.parse(report).iter("testcase"))
    failed = {c.attrib["name"] for c in cases if any(child.tag in ("failure", "error") for child in c)}
    assert failed == NOT_OURS[name], done.stdout[-4000:]
    assert len(cases) - len(failed) >= 20
