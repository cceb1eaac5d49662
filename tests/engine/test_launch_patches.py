"""`--apply-patches` on the code of an affected release: state before, what is changed, state after."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests import wheels
from tests.unit.kvtier.boxes import UNIT, model

AFFECTED = "0.29.0"
NEEDED = ("vllm/distributed/kv_transfer/kv_connector/v1/offloading",)

PROGRAM = """
import json, sys
from pathlib import Path
import msgspec
from kvtier import facts as facts_file
from kvtier.detect import software
from kvtier.launch.patching import apply_needed
from kvtier.plan.decide import plan
from kvtier.plan.wishes import Wishes
box, model = Path(sys.argv[1]), sys.argv[2]
facts = msgspec.structs.replace(facts_file.load(box), patches=software.patch_states())
wishes = Wishes(ram_gib=16, nvme_gib=64, kv_cache_dtype="fp8", spec="mtp", spec_tokens=4)
states = lambda facts: {patch.name: patch.state for patch in plan(facts, model, wishes).patches}
before = states(facts)
facts, said = apply_needed(plan(facts, model, wishes), facts)
again = apply_needed(plan(facts, model, wishes), facts)[1]
print(json.dumps({"before": before, "after": states(facts), "said": said, "again": again}))
"""


def test_needed_patches_are_applied_once(tmp_path: Path) -> None:
    """On 0.29.0 both patches are needed and get applied, the plan sees it, and a second time changes nothing."""
    release = wheels.unpacked(AFFECTED)
    for name in NEEDED:
        shutil.copytree(release / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so"))
    for name in ("__init__.py", "_version.py"):
        shutil.copy(release / "vllm" / name, tmp_path / "vllm" / name)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = [sys.executable, "-c", PROGRAM, str(UNIT / "facts/arc-pro-b70.json"), model("qwen3_5-hybrid-mtp")]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["before"] == {"vllm-52771": "needed", "vllm-52807": "needed"}
    assert told["after"] == {"vllm-52771": "applied", "vllm-52807": "applied"}
    assert told["said"] and told["again"] == []
