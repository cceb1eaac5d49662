"""What an engine's processes tell each other lies in one directory that never outlives them for long."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

MAKE = "from lmcache_nvme_backend.run_directory import make_run_directory as m; p = m(); print(m(), flush=True)"


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("KVTIER_RUN_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def front(code):
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def test_it_goes_with_the_front_process(temporary):
    """An orderly end removes it."""
    done = subprocess.run([sys.executable, "-c", MAKE], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).parent == temporary
    assert list(temporary.iterdir()) == []


def test_a_killed_fronts_directory_is_swept_by_the_next_and_a_live_ones_is_not(temporary):
    """SIGKILL leaves it behind; the next start takes it away, and only it."""
    killed, alive = front(MAKE + "; input()"), front(MAKE + "; input()")
    try:
        left, kept = Path(killed.stdout.readline().strip()), Path(alive.stdout.readline().strip())
        killed.kill()
        killed.wait()
        assert left.is_dir() and kept.is_dir()
        subprocess.run([sys.executable, "-c", MAKE], check=True, stdout=subprocess.DEVNULL)
        assert not left.exists()
        assert kept.is_dir()
    finally:
        for process in (killed, alive):
            process.kill()
            process.communicate()


def test_values_of_a_child_are_served_by_its_front(temporary):
    """The whole path of a metric: exported in one process, scraped in another."""
    code = """
import os, subprocess, sys
from lmcache_nvme_backend import metrics
metrics.serve_children()
child = '''
from lmcache_nvme_backend.metrics import MetricsExporter
values = {"kvtier_chunks_hit_total": 7, "kvtier_chunks_dropped_total": {"staging full": 2}, "kvtier_degraded": 0}
exporter = MetricsExporter(lambda: values, rank=3)
assert exporter.exporting
values["kvtier_chunks_hit_total"] = 9
exporter.close()
'''
subprocess.run([sys.executable, "-c", child], check=True)
from prometheus_client import generate_latest
print(generate_latest().decode())
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 'kvtier_chunks_hit_total{rank="3"} 9.0' in told
    assert 'kvtier_chunks_dropped_total{cause="staging full",rank="3"} 2.0' in told
    assert 'kvtier_degraded{rank="3"} 0.0' in told
    assert "# TYPE kvtier_chunks_hit_total counter" in told


def test_without_a_front_nothing_is_exported(temporary):
    """LMCache outside vLLM has nobody who would serve it."""
    from lmcache_nvme_backend.metrics import MetricsExporter

    assert "KVTIER_METRICS_DIR" not in os.environ
    exporter = MetricsExporter(lambda: {}, rank=0)
    assert not exporter.exporting
    exporter.close()
