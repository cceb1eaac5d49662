"""Whose KV a key of LMCache's server names.

A key carries the model's name. That is no proof: the weights at a path are replaced, and the same weights give other
KV under other engine settings. So vLLM's process puts a *mark* behind the name (`engine_mark`), a digest of everything
it knows of the model and of how KV is computed and laid out, and keys of different KV differ for LMCache's own memory,
for this store, and for whatever is shared between hosts.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from lmcache_nvme_backend.fingerprint import identify_model

_MARK = re.compile(r"(.*)#kvtier-([0-9a-f]{32})(.*)", re.DOTALL)
# The files of a model that is identified by its path are looked at again this often at most, some 20 us each.
_LOOK_INTERVAL_S = 1.0


def digest_of(facts: Mapping[str, Any]) -> str:
    """32 hexadecimal digits for facts that JSON can tell."""
    return blake2b(msgspec.json.encode(dict(facts), order="deterministic"), digest_size=16).hexdigest()


def marked(name: str, digest: str) -> str:
    """A model's name with the mark of the engine that computes its KV."""
    return f"{name}#kvtier-{digest}"


def split_mark(name: str) -> tuple[str, str | None]:
    """The name as the engine's user knows it, and the mark's digest, if there is one."""
    found = _MARK.fullmatch(name)
    return (found[1] + found[3], found[2]) if found else (name, None)


class Unproven(Exception):
    """Why a key's KV cannot be told from that of other weights."""


class ModelIdentities:
    """Names to identities. Thread-safe; raises `Unproven` and nothing else."""

    def __init__(self, given: str, by_path: bool) -> None:
        self._given, self._by_path = given, by_path
        self._lock = threading.Lock()
        self._paths: dict[str, _PathIdentity] = {}

    def of(self, name: str) -> str:
        """What proves `name`: the engine's mark, the user's word, or, where that is allowed, the weights at a path."""
        plain, digest = split_mark(name)
        if digest is not None:
            # What LMCache itself adds to a name behind the mark (a layout) is part of the identity.
            rest = name.removeprefix(plain) if name.startswith(plain) else name
            return f"engine:{digest}" if rest == f"#kvtier-{digest}" else f"engine:{digest}:{name}"
        if self._given:
            return f"given:{self._given}:{name}"
        if not self._by_path:
            raise Unproven(
                f"the keys of {name!r} carry no mark of the engine, so nothing proves whose weights their KV is of. "
                'Add "kvtier.identity": "auto" to kv_connector_extra_config in the --kv-transfer-config of the engine, '
                "with lmcache_nvme_backend installed beside vLLM; or set model_fingerprint in adapter_params"
            )
        with self._lock:
            known = self._paths.get(name)
            if known is None:
                known = self._paths[name] = _PathIdentity(name)
            return known.identity()


class _PathIdentity:
    """The weights at a path as they were at first sight. What is replaced later may be served by an engine that still
    has the old ones in memory, or by one that has the new: nobody here can know, so it is unproven from then on."""

    def __init__(self, name: str) -> None:
        self._path = Path(name)
        try:
            self._stamp = _stamp(self._path)
            self._identity = identify_model(name)
        except (OSError, ValueError) as e:
            raise Unproven(f"the weights of {name!r} cannot be identified on this machine: {e}") from None
        self._looked = time.monotonic()
        self._changed = False

    def identity(self) -> str:
        if not self._changed and time.monotonic() - self._looked >= _LOOK_INTERVAL_S:
            self._looked = time.monotonic()
            try:
                self._changed = _stamp(self._path) != self._stamp
            except OSError:
                self._changed = True
        if self._changed:
            raise Unproven(f"the files of {str(self._path)!r} changed while this server ran. Restart it")
        return self._identity


def _stamp(path: Path) -> Any:
    """Changes with a model's files; None for a name in the hub's cache, whose snapshots do not change."""
    if not path.exists():
        return None
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return tuple((file.name, found.st_size, found.st_mtime_ns) for file in files for found in (file.stat(),))
