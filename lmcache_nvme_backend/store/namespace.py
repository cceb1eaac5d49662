"""Namespaces: two runs share chunks only where every fact that shapes the bytes is equal."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from lmcache_nvme_backend.store import osio
from lmcache_nvme_backend.store.format import FORMAT_VERSION

Fact = str | int | bool | None | list[Any]

DIGEST_HEX = 32
_DIGEST = re.compile(r"[0-9a-f]{32}")
DESCRIPTION = "namespace.json"
# A description larger than this is not one of ours.
_DESCRIPTION_LIMIT = 1 << 20


def is_namespace_dir(name: str) -> bool:
    return _DIGEST.fullmatch(name) is not None


class Description(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of namespace.json: the facts in words, for people and for `kvtier store`. The notes shape nothing."""

    digest: str
    format_version: int
    facts: dict[str, Any]
    notes: dict[str, str] = {}


class NamespaceDigest:
    """A namespace of which no more is known than its name: enough to read its chunks."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    @property
    def digest(self) -> str:
        return self._raw.hex()

    @property
    def raw_digest(self) -> bytes:
        """The 16 bytes that go into every chunk's header."""
        return self._raw


class Namespace(NamespaceDigest):
    """The facts that shape a chunk's bytes, and their digest, the name of the directory.

    A fact is a string, an integer, a bool, None or a list of these; floats are refused, since their text is not
    canonical. The order of the facts does not matter, the order within a list does. Notes are for people, such as where
    the model was read from, and are no part of the digest.
    """

    def __init__(self, facts: Mapping[str, Fact], notes: Mapping[str, str] | None = None) -> None:
        for name, value in facts.items():
            _check_fact(name, value)
        self.facts: dict[str, Fact] = dict(sorted(facts.items()))
        self.notes = dict(notes or {})
        # JSON tells apart all types that are allowed (1, true, "1", null), and quotes what could be a separator.
        canonical = msgspec.json.encode([FORMAT_VERSION, self.facts])
        super().__init__(blake2b(canonical, digest_size=DIGEST_HEX // 2).digest())

    def __repr__(self) -> str:
        return f"Namespace({self.digest}, {self.facts!r})"


def _check_fact(name: str, value: object) -> None:
    if isinstance(value, list):
        for item in value:
            _check_fact(name, item)
    elif value is not None and not isinstance(value, str | int):
        raise TypeError(f"fact {name!r}: {type(value).__name__} is not a string, integer, bool, None or list of these")


def read_description(directory: str) -> Description | None:
    """What namespace.json says, or None where it is missing, damaged or belongs to another directory."""
    try:
        fd = osio.open(f"{directory}/{DESCRIPTION}", 0)
    except OSError:
        return None
    try:
        data = osio.pread(fd, _DESCRIPTION_LIMIT, 0)
        found = msgspec.json.decode(data, type=Description)
    except (OSError, msgspec.MsgspecError, ValueError):
        return None
    finally:
        osio.close_quietly(fd)
    return found if directory.endswith(found.digest) else None


def write_description(directory: str, namespace: Namespace, temporary: str) -> None:
    """Create namespace.json, or repair it where it is damaged. A good one is left alone."""
    description = Description(namespace.digest, FORMAT_VERSION, dict(namespace.facts), namespace.notes)
    if read_description(directory) == description:
        return
    data = msgspec.json.format(msgspec.json.encode(description), indent=2)
    osio.write_file_atomically(f"{directory}/{DESCRIPTION}", temporary, data)
