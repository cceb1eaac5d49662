import subprocess
import sys
import threading

import pytest

from kvtier import cachedir
from kvtier.cachedir import built_once, cache_dir, require_space
from lmcache_nvme_backend.errors import ConfigError


def test_the_place_follows_the_environment(monkeypatch, tmp_path):
    """Our own variable, then XDG's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("KVTIER_CACHE_DIR", raising=False)
    assert cache_dir() == tmp_path / "xdg" / "kvtier"
    monkeypatch.setenv("KVTIER_CACHE_DIR", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    assert (tmp_path / "own").is_dir()


def test_a_place_that_cannot_be_made_is_named(monkeypatch, tmp_path):
    """One error that names the variable and what was found."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVTIER_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="KVTIER_CACHE_DIR"):
        cache_dir()


def test_too_little_space_is_said_before_the_work(tmp_path):
    """The error says how much is there and how much is needed."""
    with pytest.raises(ConfigError, match=r"at least 1000000000\.0 GB for the model"):
        require_space(tmp_path, 10**18, "the model")


def test_a_failed_build_leaves_nothing_that_looks_finished(tmp_path):
    """The target appears whole or not at all, and the next build starts from an empty folder."""

    def fail(part):
        (part / "half").touch()
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError):
        built_once(tmp_path / "model", fail)
    assert [p for p in tmp_path.iterdir() if p.is_dir()] == []
    built_once(tmp_path / "model", lambda part: (part / "whole").touch())
    assert [p.name for p in (tmp_path / "model").iterdir()] == ["whole"]


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path):
    """SIGKILL in the middle leaves a temporary folder; it never becomes the target and does not stay."""
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom kvtier.cachedir import built_once\n"
        "def build(part):\n    (part / 'half').touch()\n    os.kill(os.getpid(), 9)\n"
        "built_once(Path(sys.argv[1]), build)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "model")]).returncode == -9
    assert not (tmp_path / "model").exists()
    built_once(tmp_path / "model", lambda part: (part / "whole").touch())
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["model"]


def test_two_at_once_build_it_once(tmp_path, monkeypatch):
    """The second waits, says so, and takes the first one's result."""
    first_is_building, second_waits, built, waited = threading.Event(), threading.Event(), [], []

    def build(part):
        built.append(part)
        first_is_building.set()
        assert second_waits.wait(20)

    def on_wait():
        waited.append(True)
        second_waits.set()

    first = threading.Thread(target=built_once, args=(tmp_path / "model", build))
    first.start()
    assert first_is_building.wait(20)
    assert built_once(tmp_path / "model", build, on_wait) == tmp_path / "model"
    first.join(20)
    assert len(built) == 1 and waited == [True]
    assert cachedir.built_once(tmp_path / "model", build) == tmp_path / "model"
