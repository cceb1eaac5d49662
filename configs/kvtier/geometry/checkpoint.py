"""Find a model's files: a directory, a config.json, or a name in the local hub cache. Nothing is downloaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from lmcache_nvme_backend.errors import ConfigError

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


class Checkpoint(msgspec.Struct, frozen=True):
    """A model as found on this machine."""

    name: str
    """What the user called it; the engine gets the same."""
    directory: Path
    config: dict[str, Any]
    weights_bytes: int | None
    """Bytes of the weights, from the safetensors index or the shard files; None where neither is here."""
    weights_source: str


def find(model: str) -> Checkpoint:
    """Look up `model` locally.

    Raises:
        ConfigError: nothing of that name is here, or its config.json cannot be read.
    """
    path = Path(model).expanduser()
    if path.name == "config.json" and path.is_file():
        path = path.parent
    directory = path if (path / "config.json").is_file() else _in_hub_cache(model)
    if directory is None:
        raise ConfigError(
            "MODEL",
            repr(model),
            "a directory with a config.json, or a model that lies in the local hub cache",
            f"Fetch it first, for example with `hf download {model} config.json model.safetensors.index.json`.",
        )
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            "MODEL", f"{directory / 'config.json'}: {error}", "a readable JSON file", "Download the file again."
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(
            "MODEL",
            f"{directory / 'config.json'} that holds a {type(config).__name__}",
            "a JSON object with the model's configuration",
            "Download the file again.",
        )
    weights, source = _weights(directory)
    return Checkpoint(name=model, directory=directory, config=config, weights_bytes=weights, weights_source=source)


def _in_hub_cache(model: str) -> Path | None:
    if model.count("/") != 1 or model.startswith((".", "/")):
        return None
    home = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    repository = hub / f"models--{model.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = repository / "snapshots" / revision
    return snapshot if (snapshot / "config.json").is_file() else None


def _weights(directory: Path) -> tuple[int | None, str]:
    for name in _INDEXES:
        index = directory / name
        if not index.is_file():
            continue
        try:
            total = json.loads(index.read_text())["metadata"]["total_size"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        if isinstance(total, int | float) and 0 < total < float("inf"):
            return int(total), f"{name}, metadata.total_size"
    shards = [*directory.glob("*.safetensors"), *directory.glob("*.gguf")]
    if shards:
        return sum(shard.stat().st_size for shard in shards), f"sizes of {len(shards)} weight files"
    return None, "no safetensors index and no weight files here"
