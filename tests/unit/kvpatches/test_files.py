"""What happens on disk: atomic, exact, resumable, and refused clearly."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from small_vllm import site

import kvpatches
from kvpatches import State

ROOT = Path(kvpatches.__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}

STEPS = ("open", "os.rename", "os.remove", "os.mkdir", "os.chmod", "os.chown", "fcntl.flock")


def killed_at(step: int, folder: Path, command: Callable[[], object]) -> bool:
    """Run the command in a fork that is killed before its `step`-th action on files; whether it lived to its end."""
    child = os.fork()
    if child == 0:
        left = step

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event in STEPS and (event != "open" or str(arguments[0]).startswith(str(folder))):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        command()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status == 0


def run(*arguments: str, **how: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvpatches", *arguments], env=ENVIRONMENT, capture_output=True, text=True, cwd="/", **how
    )


def leftovers(path: Path) -> list[str]:
    return sorted(f.name for f in path.parent.rglob("*") if f.is_file() and f != path and f.suffix != ".lock")


def test_killed_at_any_step_the_file_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    """Apply and revert, killed before the N-th step for every N: the file is whole, and running again ends well."""
    path = site(tmp_path)
    original = path.read_bytes()
    kvpatches.apply(site=tmp_path)
    patched = path.read_bytes()
    kvpatches.revert(site=tmp_path)
    deaths = 0
    for command in (kvpatches.apply, kvpatches.revert):
        for step in range(1, 60):
            if command is kvpatches.revert:
                kvpatches.apply(site=tmp_path)
            ended = killed_at(step, tmp_path, lambda c=command: c(site=tmp_path))
            assert path.read_bytes() in (original, patched), f"{command} killed at step {step}"
            kvpatches.apply(site=tmp_path)
            assert path.read_bytes() == patched
            kvpatches.revert(site=tmp_path)
            assert path.read_bytes() == original
            if ended:
                break
            deaths += 1
        else:
            raise AssertionError(f"{command} did not end in 60 steps")
    assert deaths > 10


def test_many_at_once_leave_one_whole_patched_file(tmp_path: Path) -> None:
    """Four starts on one volume at the same time: all succeed, and revert still gives the original back."""
    path = site(tmp_path)
    original = path.read_bytes()
    codes: list[int] = []
    threads = [
        threading.Thread(target=lambda: codes.append(run("apply", "--site", str(tmp_path)).returncode))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * 4
    assert {r.state for r in kvpatches.status(tmp_path)} == {State.APPLIED}
    kvpatches.revert(site=tmp_path)
    assert path.read_bytes() == original and leftovers(path) == []


def test_apply_and_revert_side_by_side_never_leave_a_mixture(tmp_path: Path) -> None:
    """One loop applies, one reverts: each reader sees one of the two contents."""
    path = site(tmp_path)
    original = path.read_bytes()
    kvpatches.apply(site=tmp_path)
    patched = path.read_bytes()
    commands = [
        subprocess.Popen([sys.executable, "-m", "kvpatches", c, "--site", str(tmp_path)], env=ENVIRONMENT, cwd="/")
        for c in ("apply", "revert") * 2
    ]
    seen = set()
    while any(c.poll() is None for c in commands):
        seen.add(path.read_bytes())
    assert [c.wait() for c in commands] == [0] * 4
    assert seen <= {original, patched}
    kvpatches.revert(site=tmp_path)
    assert path.read_bytes() == original


def test_mode_and_a_shared_hard_link_survive(tmp_path: Path) -> None:
    """The file keeps its mode, and an installer's cache that shares its content by a hard link is not touched."""
    path = site(tmp_path)
    path.chmod(0o640)
    shared = tmp_path / "cache.py"
    shared.hardlink_to(path)
    original = path.read_bytes()
    kvpatches.apply(site=tmp_path)
    assert path.read_bytes() != original and shared.read_bytes() == original
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("mode", list(py_compile.PycInvalidationMode))
def test_bytecode_of_the_old_source_is_removed(tmp_path: Path, mode: py_compile.PycInvalidationMode) -> None:
    """Compiled files of the old source go, also the kind that Python would never check; current ones stay."""
    path = site(tmp_path)
    compiled = Path(str(py_compile.compile(str(path), invalidation_mode=mode)))
    kvpatches.apply(site=tmp_path)
    assert not compiled.exists()
    py_compile.compile(str(path), invalidation_mode=mode)
    assert not kvpatches.apply(site=tmp_path)[0].changed and compiled.exists()


def test_patches_come_and_go_one_by_one_and_the_last_gives_the_original_back(tmp_path: Path) -> None:
    """Three applied apart, taken back apart: each step is what a fresh apply of the rest would give."""
    path = site(tmp_path)
    original = path.read_bytes()
    kvpatches.apply(["vllm-52771"], tmp_path)
    two = path.read_bytes()
    kvpatches.apply(["vllm-52923"], tmp_path)
    kvpatches.revert(["vllm-52923"], tmp_path)
    assert path.read_bytes() == two
    kvpatches.revert(["vllm-52771"], tmp_path)
    assert {r.id for r in kvpatches.status(tmp_path) if r.state is State.APPLIED} == {"vllm-52807"}
    kvpatches.revert(site=tmp_path)
    assert path.read_bytes() == original and leftovers(path) == []


def test_an_upgrade_in_between_starts_afresh(tmp_path: Path) -> None:
    """A reinstalled file is judged by itself: the stale record neither blocks apply nor is restored over it."""
    path = site(tmp_path)
    kvpatches.apply(site=tmp_path)
    newer = (path.parent / ".kvpatches" / f"{path.name}.orig").read_bytes() + b"\n# a newer release\n"
    path.write_bytes(newer)
    assert not kvpatches.revert(site=tmp_path)[0].changed and path.read_bytes() == newer
    kvpatches.apply(site=tmp_path)
    kvpatches.revert(site=tmp_path)
    assert path.read_bytes() == newer


def test_without_a_true_backup_revert_refuses(tmp_path: Path) -> None:
    """A damaged backup, or a file edited after it was patched, is refused and left as it is."""
    path = site(tmp_path)
    kvpatches.apply(site=tmp_path)
    patched = path.read_bytes()
    backup = path.parent / ".kvpatches" / f"{path.name}.orig"
    original = backup.read_bytes()
    backup.write_bytes(original + b"#")
    with pytest.raises(kvpatches.ConfigError, match="backup"):
        kvpatches.revert(site=tmp_path)
    backup.write_bytes(original)
    path.write_bytes(patched + b"# edited\n")
    with pytest.raises(kvpatches.ConfigError, match="changed after"):
        kvpatches.revert(site=tmp_path)
    assert path.read_bytes() == patched + b"# edited\n"


def test_a_directory_that_cannot_be_written_is_a_clear_refusal() -> None:
    """As another user: exit 4, the path and what to do are named, the file is whole."""
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        path = site(folder)
        before = path.read_bytes()
        path.parent.chmod(0o555)
        # Root is refused nothing, so root becomes somebody else first, with everything imported.
        code = (
            "import os, sys, kvpatches; from kvpatches.__main__ import main; main(['status', *sys.argv[1:]])\n"
            "if os.geteuid() == 0: os.setgid(65534); os.setuid(65534)\n"
            "sys.exit(main(['apply', *sys.argv[1:]]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, "--site", str(folder)],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            cwd="/",
        )
        assert done.returncode == 4, done.stderr
        assert str(path.parent) in done.stderr and "Nothing was changed" in done.stderr
        assert path.read_bytes() == before
        path.parent.chmod(0o755)
    finally:
        shutil.rmtree(folder)


def test_the_command_line_has_documented_exit_codes(tmp_path: Path) -> None:
    """1 needed, 0 done, 1 for a dry run with a diff and 0 without, 3 unknown, 5 no vLLM, 4 unknown option, 2 usage."""
    where = ("--site", str(tmp_path / "s"))
    assert run("status", *where).returncode == 5
    path = site(tmp_path / "s")
    before = path.read_bytes()
    assert run("status", *where).returncode == 1
    dry = run("apply", "--dry-run", *where)
    assert dry.returncode == 1 and "+++ b/vllm/" in dry.stdout and path.read_bytes() == before
    assert run("apply", *where).returncode == 0
    assert run("apply", "--dry-run", *where).returncode == 0
    assert run("status", *where).returncode == 0
    assert run("apply", "--with", "nonsense", *where).returncode == 4
    path.write_text("x = (", encoding="utf-8")
    assert run("status", *where).returncode == run("apply", *where).returncode == 3
    assert run("frobnicate").returncode == 2


def test_json_says_the_same(tmp_path: Path) -> None:
    """Status, apply, show and errors are JSON where asked for."""
    site(tmp_path)
    rows = json.loads(run("status", "--json", "--site", str(tmp_path)).stdout)
    assert {r["state"] for r in rows["patches"]} == {"needed"} and rows["adaptations"] == []
    files = json.loads(run("apply", "--json", "--site", str(tmp_path)).stdout)["files"]
    assert files[0]["changed"] and "vllm-52771" in files[0]["patches"]
    assert json.loads(run("show", "vllm-52771", "--json").stdout)["id"] == "vllm-52771"
    assert json.loads(run("apply", "nope", "--json", "--site", str(tmp_path)).stdout)["exit"] == 4


def test_it_runs_on_the_bare_interpreter(tmp_path: Path) -> None:
    """Without site-packages, as in a container's start script before anything else works."""
    site(tmp_path)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "kvpatches", "apply", "--site", str(tmp_path)],
        env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_adaptations_in_the_process_are_listed_and_a_broken_provider_is_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A provider's rows appear with their states; one that is absent is nothing, one that fails is unknown code."""
    (tmp_path / "good_provider.py").write_text(
        "def adaptations():\n"
        "    rows = [('a', 'applied'), ('b', 'odd')]\n"
        "    return [dict(id=i, title='t', state=s, detail='d') for i, s in rows]\n"
    )
    (tmp_path / "bad_provider.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("kvpatches.in_process.PROVIDERS", ("good_provider", "absent.one", "bad_provider"))
    rows = kvpatches.adaptations()
    assert [(r.id, r.state) for r in rows] == [
        ("a", State.APPLIED), ("b", State.UNKNOWN_CODE), ("bad_provider", State.UNKNOWN_CODE),
    ]  # fmt: skip
