"""Before the first request: does a row of vLLM's host buffer come back from the disk as it went?

The buffer is shared memory, from which the disk takes what it writes without a copy where the system allows it. What it
does not allow shows here, and not in a first answer. It runs while the buffer is empty, and leaves it as it was.
"""

from __future__ import annotations

import logging
import os

from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.store import ChunkStore, Hit, PutResult, digest_fields

logger = logging.getLogger("vllm.lmcache_nvme_backend")


def check_rows(store: ChunkStore, buffer: memoryview, rows: int, row_bytes: int) -> None:
    """Carry noise from one row to another through the store. Raises `ConfigError` where other bytes come back."""
    if rows < 2:
        raise ConfigError(
            "cpu_bytes_to_use", f"room for {rows} chunks of {row_bytes / 2**20:.2f} MiB", "room for two at least",
            "Raise it in kv_connector_extra_config.",
        )  # fmt: skip
    out, back = buffer[:row_bytes], buffer[row_bytes : 2 * row_bytes]
    before = bytes(out), bytes(back)
    key = digest_fields("self-test", os.getpid(), os.urandom(8))
    try:
        out[:] = os.urandom(row_bytes)
        if store.put(key, out, depth=0) is not PutResult.STORED:
            return  # a full or read-only disk: every store will say why it is dropped
        result = store.get(key, back)
        if not isinstance(result, Hit):
            # Every load is checked like this one, so it is no reason not to serve; but a person should know.
            logger.warning(
                "lmcache_nvme_backend: self-test: the disk did not give its chunk back: %s", result.cause.value
            )
        elif back != out:
            raise ConfigError(
                "self_test", "other bytes than were stored, in vLLM's host buffer", "the same bytes",
                "Serving would give wrong answers: report this machine's kernel and file system.",
            )  # fmt: skip
    finally:
        store.remove(key)
        out[:], back[:] = before
        out.release()
        back.release()
