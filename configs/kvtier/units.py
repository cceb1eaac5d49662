"""Byte units and how they are read and printed."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def gib(count: float) -> str:
    """Bytes as GiB with as many digits as a person needs: ``16 GiB``, ``15.97 GiB``; below one as MiB: ``256 MiB``."""
    if 0 < abs(count) < GIB:
        return f"{count / MIB:,.0f} MiB"
    value = count / GIB
    return f"{value:.0f} GiB" if abs(value - round(value)) < 0.005 else f"{value:.2f} GiB"


def rate(bytes_per_s: float) -> str:
    """A transfer rate in decimal GB/s, the unit that disks and links are sold in."""
    return f"{bytes_per_s / 1e9:.1f} GB/s"


def count(number: float) -> str:
    """A count with thousands separated."""
    return f"{number:,.0f}"


def version_tuple(version: str) -> tuple[int, int, int]:
    """The first three numbers of a version string; a release candidate counts as its release.

    ``0.27.2rc1.dev77+g1234`` is ``(0, 27, 2)``: upstream cuts development builds from the branch of that release, so
    what is true of the release is the best guess for the build.
    """
    parts: list[int] = []
    for piece in version.split("+")[0].split("."):
        digits = ""
        for character in piece:
            if not character.isdigit():
                break
            digits += character
        if not digits:
            break
        parts.append(int(digits))
        if digits != piece:
            break
    padded = (*parts, 0, 0, 0)
    return padded[0], padded[1], padded[2]
