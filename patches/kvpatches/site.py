"""Where vLLM is installed, found without importing it."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from kvpatches.errors import NotInstalled

_VERSION = re.compile(r"""^(?:__version__|version)\b[^'"\n]*=\s*['"]([^'"]+)['"]""", re.MULTILINE)


@dataclass(frozen=True)
class InstalledVllm:
    """A directory that holds the package `vllm`: site-packages, or the root of a source tree.

    `version` is what the package says of itself, None where it says nothing. It is shown, and it decides nothing
    where there is code to look at.
    """

    path: Path
    version: str | None

    def file(self, name: str) -> Path:
        return self.path / name


def locate(site: str | Path | None = None) -> InstalledVllm:
    """The installation in `site`, or the one that this interpreter would import. Raises NotInstalled."""
    if site is not None:
        path = Path(site).absolute()
        if not (path / "vllm" / "__init__.py").is_file():
            raise NotInstalled(
                "--site", f"no package vllm in {path}", "a directory that holds vllm/", "Name vLLM's site-packages."
            )
    else:
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            raise NotInstalled(
                "vLLM", "no package vllm for this interpreter", "an environment with vLLM", "Use its Python, or --site."
            )
        path = Path(spec.origin).parent.parent
    return InstalledVllm(path, _version(path / "vllm" / "_version.py"))


def _version(file: Path) -> str | None:
    try:
        match = _VERSION.search(file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return match[1] if match else None


def release(version: str) -> tuple[int, ...]:
    """The release numbers at the head of a version: "0.29.0rc1+cu130" is (0, 29, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
