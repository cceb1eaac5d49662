"""The example files that ship with the package."""

from __future__ import annotations

from pathlib import Path


def example(name: str) -> Path:
    """The file `name` of configs/examples: inside an installed package, beside it in a checkout."""
    here = Path(__file__).parent
    for folder in (here / "examples", here.parent / "examples"):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"example {name} is neither in the package nor beside it")
