"""A tier that cannot work ends the start with its reason as the last lines; `degrade` says so and shows it.

None of them hangs: an engine that ended would not come back from `refused` otherwise before the test's own timeout.
"""

from __future__ import annotations

import fcntl
import os

import pytest

from .conftest import refused, text


def last_lines(told: str) -> str:
    return "\n".join(told.strip().splitlines()[-3:])


@pytest.mark.parametrize(
    "changes, setting",
    [
        ({"quota_gb": 3}, "nvme.quota_gb"),
        ({"path": "relative"}, "nvme.path"),
        ({"direct_io": "perhaps"}, "nvme.direct_io"),
    ],
    ids=["unknown-key", "relative-path", "bad-value"],
)
def test_a_bad_setting_ends_the_start_in_the_front_process(start_engine, tmp_path, changes, setting):
    """Before anything is loaded: the reason names the setting and is the last thing printed."""
    told = refused(start_engine, tmp_path, **changes)
    assert setting in last_lines(told)
    assert "lmcache_nvme_backend: the start was refused" in last_lines(told)


def test_what_only_a_worker_can_know_ends_the_start_too(start_engine, tmp_path):
    """The root's lock is held by somebody else for longer than nvme.lock_wait_s."""
    (tmp_path / "v1").mkdir(mode=0o700)
    with (tmp_path / "v1/account").open("w+b") as account:
        fcntl.flock(account, fcntl.LOCK_EX)
        told = refused(start_engine, tmp_path, lock_wait_s=1)
    assert "nvme.lock_wait_s" in last_lines(told)


def test_a_failure_policy_that_kills_requests_is_refused(start_engine, tmp_path):
    """vLLM's default is `fail`: a chunk that cannot be read would end its request."""
    told = refused(start_engine, tmp_path, transfer={"kv_load_failure_policy": "fail"})
    assert "kv_load_failure_policy" in last_lines(told) and "recompute" in last_lines(told)


SWAPPED_LAYERS = """
import wrapt

def break_it(module):
    right = module.CpuBlockConnector.to_gpu
    def to_gpu(self, memory_obj, start, end, *, kvcaches, **kwargs):
        first, second, *rest = kvcaches
        right(self, memory_obj, start, end, kvcaches=[second, first, *rest], **kwargs)
    module.CpuBlockConnector.to_gpu = to_gpu

wrapt.register_post_import_hook(break_it, "lmcache_nvme_backend.doors.cpu_connector")
"""


def test_a_connector_that_mixes_up_layers_ends_the_start(start_engine, tmp_path):
    """The self-test finds out before the first request; wrong answers are worse than none."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/sitecustomize.py").write_text(SWAPPED_LAYERS)
    path = os.pathsep.join([str(tmp_path / "broken"), *filter(None, [os.environ.get("PYTHONPATH")])])
    (tmp_path / "kv").mkdir()
    told = refused(start_engine, tmp_path / "kv", env={"PYTHONPATH": path})
    assert "nvme.self_test" in last_lines(told) and "in layer 0" in last_lines(told)


def test_degrade_serves_without_the_tier_and_shows_it(start_engine, tmp_path):
    """`on_init_error: degrade`: loud in the log, 1 in a metric, and every request completes."""
    gone = tmp_path / "gone"
    with start_engine(gone, on_init_error="degrade") as engine:
        assert engine.ask(text(100, seed=5)).completion_tokens == 12
        assert engine.metric("kvtier_degraded") == 1
        assert "DEGRADED" in engine.log() and "nvme.path" in engine.log()
