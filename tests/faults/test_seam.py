"""The failing calls are all of them: the store reaches the file system through one module and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import lmcache_nvme_backend.store

STORE = Path(lmcache_nvme_backend.store.__file__).parent
CALLS = {
    "access", "chmod", "chown", "close", "copy_file_range", "fallocate", "fchmod", "fdatasync", "fstat", "fsync",
    "ftruncate", "link", "listdir", "lseek", "lstat", "makedirs", "mkdir", "mkfifo", "open", "posix_fadvise",
    "posix_fallocate", "pread", "preadv", "pwrite", "pwritev", "read", "readlink", "readv", "remove", "removedirs",
    "rename", "renames", "replace", "rmdir", "scandir", "sendfile", "stat", "statvfs", "symlink", "sync", "truncate",
    "unlink", "utime", "walk", "write", "writev", "flock", "lockf",
}  # fmt: skip
# Methods of `Path` and of open files; `open` as such, and what `shutil` and `tempfile` have.
METHODS = {
    "chmod", "exists", "glob", "hardlink_to", "is_dir", "is_file", "iterdir", "lstat", "mkdir", "open", "read_bytes",
    "read_text", "rename", "rglob", "rmdir", "samefile", "stat", "symlink_to", "touch", "unlink", "write_bytes",
    "write_text",
}  # fmt: skip
# Questions at a start or of a tool, whose errors are a refusal: whether the root is there, which file system it is on.
QUESTIONS = {
    ("opening.py", "root.stat"),
    ("trees.py", "root.stat"),
    ("direct_io.py", "Path('/proc/self/mountinfo').read_text"),
    ("vllm_tree.py", "os.statvfs"),
}


def calls_past_the_seam(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            owner, _, call = name.rpartition(".")
            if owner in ("os", "fcntl"):
                passed = call in CALLS
            else:
                passed = (
                    call in METHODS if owner and owner != "osio" and not owner.startswith("self") else name == "open"
                )
            if passed or owner in ("shutil", "tempfile"):
                yield name


def test_the_store_reaches_the_file_system_through_one_seam():
    """What is injected there is injected everywhere."""
    found = {
        (path.name, name)
        for path in STORE.glob("*.py")
        if path.name != "osio.py"
        for name in calls_past_the_seam(ast.parse(path.read_text("utf-8")))
    }
    assert found == QUESTIONS


def test_a_call_past_the_seam_is_found():
    """The test above can fail."""
    for text in ("os.fsync(fd)", "open(path)", "Path(p).unlink()", "shutil.rmtree(p)", "fcntl.flock(fd, 1)"):
        assert list(calls_past_the_seam(ast.parse(text))), text
    assert not list(calls_past_the_seam(ast.parse("osio.open(path, 0)")))
