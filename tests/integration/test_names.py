"""Names that come from requests and models, through LMCache's real keys: no path of theirs leads out of the root."""

from __future__ import annotations

import pytest
import torch

from .conftest import CHUNK, PagedKv, lmcache_metadata, prompt

EVIL = (
    "../../../../tmp/out", "/etc/passwd", "..", "", "a/b", "a\\..\\b", "C:\\Windows\\x", "CON", "nul\x00byte", "\ud800",
    "x" * 300, "ü" * 300, "e\u0301", "\u00e9", "a@b%c", "user%x@user",
)  # fmt: skip


def test_no_tag_of_a_request_leads_out_of_the_root_or_to_anothers_chunks(lmcache, tmp_path):
    """As a tag's value and as its name: each finds its own bytes again, none another's, and every file lies where a
    digest says."""
    root = tmp_path / "root"
    root.mkdir()
    tokens = prompt(CHUNK)
    one = lmcache(path=root)
    tags = [{"lmcache.tag.user": name} for name in EVIL] + [{f"lmcache.tag.{name}": "v"} for name in EVIL]
    stored = [PagedKv(CHUNK, seed=seed) for seed in range(len(tags))]
    for number, (tag, kv) in enumerate(zip(tags, stored)):
        assert one.lookup(tokens, request=f"l{number}", request_configs=tag) == 0
        one.store(tokens, kv, request=f"s{number}", request_configs=tag)
        one.settle()
    for number, (tag, kv) in enumerate(zip(tags, stored)):
        assert one.lookup(tokens, request=f"r{number}", request_configs=tag) == CHUNK
        assert one.retrieve(tokens, kv, request=f"r{number}", request_configs=tag) == CHUNK
        assert all(torch.equal(a, b) for a, b in zip(kv.content(0), kv.content(1), strict=True))
    chunks = list(root.glob("v1/*/*/*.kv"))
    assert len(chunks) == len(tags)
    assert all(set(path.name.removesuffix(".kv")) <= set("0123456789abcdef-") for path in chunks)
    assert {path.name for path in tmp_path.iterdir()} == {"root"} and {path.name for path in root.iterdir()} == {"v1"}


@pytest.mark.parametrize("name", [name for name in EVIL if name != "\ud800"], ids=ascii)
def test_no_name_of_a_model_leads_out_of_the_root(lmcache, tmp_path, name):
    """The served name is a note in namespace.json; the directory is a digest of facts."""
    root = tmp_path / "root"
    root.mkdir()
    metadata = lmcache_metadata()
    metadata.model_name = name
    lmcache(metadata, path=root, model_fingerprint=name or "empty")
    (namespace,) = (path.name for path in (root / "v1").iterdir() if path.name not in ("account", "sessions", "temp"))
    assert len(namespace) == 32 and set(namespace) <= set("0123456789abcdef")
    assert {path.name for path in tmp_path.iterdir()} == {"root"}
