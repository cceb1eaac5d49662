"""Who may share a chunk: LoRA adapter and ``cache_salt``, which LMCache leaves out of its keys.

LMCache puts tags of a request's sampling parameters (``lmcache.tag.*``) into every key it makes for that request, for
lookup and store alike. One tag of ours carries both facts, and is there for every request, so that the backend can tell
a key of an unmarked scheduler (which it refuses) from the key of a request without adapter and salt.
"""

from __future__ import annotations

import copy
import hashlib
from functools import lru_cache
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
        parts.append("lora:" + _adapter_identity(str(lora.lora_name), str(getattr(lora, "lora_path", ""))))
    if salt:
        parts.append("salt:" + hashlib.blake2b(salt.encode(), digest_size=16).hexdigest())
    return "|".join(parts) or BASE


def _adapter_identity(name: str, path: str) -> str:
    """An adapter by its weights where they lie on this machine, so that a retrained one at the same path is another."""
    try:
        stamp = tuple((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(Path(path).iterdir()))
    except OSError:
        return hashlib.blake2b(f"{name}\0{path}".encode(), digest_size=16).hexdigest()
    return _adapter_fingerprint(path, stamp)


@lru_cache(maxsize=1024)
def _adapter_fingerprint(path: str, stamp: tuple[tuple[str, int, int], ...]) -> str:
    from lmcache_nvme_backend.fingerprint import model_fingerprint

    try:
        return model_fingerprint(Path(path))
    except (OSError, ValueError):
        return hashlib.blake2b(repr((path, stamp)).encode(), digest_size=16).hexdigest()
