"""Where things lie under a root.

::

    <root>/v1/account                      usage of the whole root, and the lock that guards it
    <root>/v1/writes                       what is left of the root's write budget
    <root>/v1/sessions/<id>                one file a live store
    <root>/v1/temp/<session id>-<n>        a chunk being written
    <root>/v1/<namespace>/namespace.json
    <root>/v1/<namespace>/index.snapshot   see `snapshot`
    <root>/v1/<namespace>/<shard>/<name>   a chunk; the shard is the first two hex digits of its key
"""

from __future__ import annotations

from lmcache_nvme_backend.store.format import chunk_name

VERSION_DIR = "v1"


class Layout:
    """Paths under one root. Strings, not `Path`: they are built for every call."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.base = f"{root}/{VERSION_DIR}"
        self.account = f"{self.base}/account"
        self.sessions = f"{self.base}/sessions"
        self.writes = f"{self.base}/writes"
        self.temp = f"{self.base}/temp"

    def namespace(self, digest: str) -> str:
        return f"{self.base}/{digest}"

    def shard(self, digest: str, key: bytes) -> str:
        return f"{self.base}/{digest}/{key[:1].hex()}"

    def chunk(self, digest: str, key: bytes, depth: int, blocks: int) -> str:
        return f"{self.base}/{digest}/{key[:1].hex()}/{chunk_name(key, depth, blocks)}"
