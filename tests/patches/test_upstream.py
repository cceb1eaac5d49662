"""Upstream's own tests of the fixes, from the source archive of 0.30, against 0.29 before and after."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import kvpatches
from tests import wheels

TESTS = "tests/v1/kv_connector/unit/offloading_connector"

# The tests of the fixes, and all of the class about draft groups, whose lookups and stores the patches touch.
SELECTED = (
    "TestEagle",
    "TestSharedGroupMTPOffload",
    "TestMambaHybridOffloadServing",
    "test_recurrent_group_unhashed_block",
    "test_store_jobs_wait_for_missing_offload_key",
    "test_final_sampled_token",
    "test_abort_queued_request",
)

# What each patch mends: these fail on 0.29 as released.
MENDED = {
    "test_recurrent_group_unhashed_block_does_not_truncate_load_boundary": "vllm-52807",
    "test_shared_group_mtp_serves_like_non_speculative": "vllm-52771",
    "test_annotated_eagle_group_does_not_starve_coarse_sibling": "vllm-52771",
    "test_no_annotation_marks_no_groups": "vllm-52771",
    "test_non_eagle_tighten_clears_eagle_verified": "vllm-52771",
    "test_store_jobs_wait_for_missing_offload_key": "vllm-52923",
    "test_full_attn_store_excludes_trailing_decode_block[True]": "vllm-52771 --with finished-tail",
    "test_full_attn_store_excludes_trailing_decode_block[False]": "vllm-52771 --with finished-tail",
    "test_sw_store_excludes_trailing_decode_block[True]": "vllm-52771 --with finished-tail",
    "test_sw_store_excludes_trailing_decode_block[False]": "vllm-52771 --with finished-tail",
    "test_final_sampled_token_does_not_complete_an_offloaded_block[-1-True]": "vllm-52771 --with finished-tail",
    "test_final_sampled_token_does_not_complete_an_offloaded_block[-1-False]": "vllm-52771 --with finished-tail",
}

# These do not apply. Three test another change of 0.30, which chunks of a sliding window are worth storing at the end;
# the last replaces a method by its 0.30 signature. They fail on 0.29 with and without the patches.
OTHER_CHANGES = {
    "test_chunked_prefill_uses_final_swa_store_horizon[completed-prompt]",
    "test_active_decode_does_not_advance_swa_final_horizon",
    "test_dcp_abort_reconsiders_final_swa_tail",
    "test_sw_lookup_inflates_query_max",
}

OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "vocab_size": 50272,
    "max_position_embeddings": 10048,
    "word_embed_proj_dim": 768,
    "torch_dtype": "float16",
}


def _failed(site: Path | None, folder: Path) -> tuple[set[str], set[str]]:
    """Names of the upstream tests that ran, and of those that failed."""
    pytest.importorskip("torch")
    upstream = wheels.upstream_tests("0.30.0")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(OPT), encoding="utf-8")
    report = folder / "report.xml"
    environment = os.environ | {
        "OVERLAY": str(site or ""),
        "UPSTREAM": str(upstream),
        "MODEL": str(folder),
        "PYTHONPATH": os.pathsep.join(map(str, (wheels.unpacked("0.29.0"), upstream, Path(__file__).parent))),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "upstream_plugin", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--rootdir", str(upstream), "--confcutdir", str(upstream / TESTS)]
    command += [f"--junitxml={report}", str(upstream / TESTS / "test_scheduler.py"), "-k", " or ".join(SELECTED)]
    subprocess.run(command, env=environment, cwd=upstream, stdout=subprocess.DEVNULL)
    cases = list(ET.parse(report).iter("testcase"))
    failed = {c.attrib["name"] for c in cases if any(child.tag in ("failure", "error") for child in c)}
    return {c.attrib["name"] for c in cases}, failed


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_upstreams_own_tests_of_the_fixes_fail_before_and_pass_after(tmp_path: Path) -> None:
    """The tests that upstream wrote with the fixes pass on 0.29 with the patches, and do not without."""
    ran, failed_before = _failed(None, tmp_path / "before")
    assert failed_before == set(MENDED) | OTHER_CHANGES
    site = wheels.small_site("0.29.0", tmp_path / "site")
    kvpatches.apply(site=site, options=["finished-tail"])
    assert _failed(site, tmp_path / "after") == (ran, OTHER_CHANGES)
