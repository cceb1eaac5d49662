"""Who may share a chunk: LoRA adapter and ``cache_salt``, which LMCache leaves out of its keys.

LMCache puts tags of a request's sampling parameters (``lmcache.tag.*``) into every key it makes for that request, for
lookup and store alike. One tag of ours carries both facts, and is there for every request, so that the backend can tell
a key of an unmarked scheduler (which it refuses) from the key of a request without adapter and salt.
"""

from __future__ import annotations

import copy
import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

TAG = "kvtier"
TAG_FIELD = f"lmcache.tag.{TAG}"
BASE = "base"


def mark_request(request: Any) -> None:
    """Put the request's scope into its sampling parameters, once.

    The parameters may be shared between requests with different adapters, so they are replaced, not changed. Whatever a
    client sent under our tag's name is overwritten.
    """
    params = getattr(request, "sampling_params", None)
    if params is None:
        return
    scope = scope_of(getattr(request, "lora_request", None), getattr(request, "cache_salt", None))
    extra = dict(params.extra_args or {})
    transfer = extra.get("kv_transfer_params")
    transfer = dict(transfer) if isinstance(transfer, dict) else {}
    if transfer.get(TAG_FIELD) == scope:
        return
    transfer[TAG_FIELD] = scope
    marked = copy.copy(params)
    marked.extra_args = {**extra, "kv_transfer_params": transfer}
    request.sampling_params = marked


def scope_of(lora: Any | None, salt: str | None) -> str:
    """One text for adapter and salt; ``base`` for neither. The salt itself is a secret and goes in as a digest."""
    parts = []
    if lora is not None:
        parts.append("lora:" + _adapters.identity(lora))
    if salt:
        parts.append("salt:" + hashlib.blake2b(salt.encode(), digest_size=16).hexdigest())
    return "|".join(parts) or BASE


class _Adapters:
    """Adapters by the weights that the engine has loaded.

    vLLM reads an adapter's files once, at its first request, and so does this. Where the files change later, what is
    loaded and what lies there may differ, and where they cannot be found, they may be anything: such an adapter gets an
    identity that this process alone knows, so that its chunks are found as long as the engine runs and never after.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, str], tuple[Any, str]] = {}
        self._nonce = os.urandom(16).hex()

    def identity(self, lora: Any) -> str:
        key = (int(getattr(lora, "lora_int_id", 0)), str(lora.lora_name), str(getattr(lora, "lora_path", "")))
        directory = _adapter_directory(key[2])
        stamp = _stamp(directory)
        if key not in self._known:
            self._known[key] = (stamp, self._read(key, directory, stamp))
        first_stamp, identity = self._known[key]
        return identity if stamp == first_stamp else self._private(key, stamp)

    def _read(self, key: tuple[int, str, str], directory: Path | None, stamp: Any) -> str:
        from lmcache_nvme_backend.fingerprint import model_fingerprint

        if directory is not None and stamp is not None:
            with suppress(OSError, ValueError):
                return model_fingerprint(directory)
        return self._private(key, stamp)

    def _private(self, key: tuple[int, str, str], stamp: Any) -> str:
        return hashlib.blake2b(repr((self._nonce, key, stamp)).encode(), digest_size=16).hexdigest()


def _adapter_directory(path: str) -> Path | None:
    """Where an adapter's files lie, by vLLM's own rules: a path, ``~`` included, or a hub name in the local cache."""
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    with suppress(Exception):  # whatever a hub name may look like: it is not found then
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, "adapter_config.json")
        if isinstance(cached, str):
            return Path(cached).parent
    return None


def _stamp(directory: Path | None) -> Any:
    """Changes with the files; ``None`` where there are none."""
    if directory is None:
        return None
    try:
        return tuple((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(directory.iterdir()))
    except OSError:
        return None


_adapters = _Adapters()
