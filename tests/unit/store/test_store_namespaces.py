"""Namespaces: who may share chunks, and what a person can read about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from store_helpers import NAMESPACE, OTHER_NAMESPACE, holds, open_store, prefix, put, put_prefix

from lmcache_nvme_backend.store import Namespace


def description(root: Path, namespace: Namespace = NAMESPACE) -> Path:
    return root / "v1" / namespace.digest / "namespace.json"


def test_equal_facts_in_any_order_are_one_namespace():
    """The order in which a program collects facts does not matter; the order within a list does."""
    assert Namespace({"a": 1, "b": [1, 2]}).digest == Namespace({"b": [1, 2], "a": 1}).digest
    assert Namespace({"b": [1, 2]}).digest != Namespace({"b": [2, 1]}).digest


def test_any_other_fact_is_another_namespace():
    """Types count, too: 1, "1", true, None and an absent fact are five things."""
    facts = [{"a": 1}, {"a": "1"}, {"a": True}, {"a": None}, {}, {"a": [1]}, {"a,b": 1}, {"a": 'x","b":"y'}, {"b": 1}]
    assert len({Namespace(each).digest for each in facts}) == len(facts)


@pytest.mark.parametrize("fact", [1.5, b"x", {"x": 1}, (1,), [1, [2.0]]])
def test_a_fact_without_one_canonical_text_is_refused(fact):
    """A float's text is not canonical."""
    with pytest.raises(TypeError, match="fact 'a'"):
        Namespace({"a": fact})


def test_chunks_of_one_namespace_are_not_found_in_another(root):
    """The same keys, two models."""
    keys = prefix("both", 3)
    with open_store(root) as store, open_store(root, namespace=OTHER_NAMESPACE) as other:
        put_prefix(store, keys)
        assert store.match(keys) == 3
        assert other.match(keys) == 0
        assert not holds(other, keys[0])


def test_the_description_says_the_facts_in_words(root):
    """A person can see which of two folders is stale."""
    open_store(root).close()
    assert json.loads(description(root).read_text()) == {
        "digest": NAMESPACE.digest,
        "format_version": 1,
        "facts": {"model": "m", "dtype": "bf16", "rank": 0},
    }


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"digest":"x","format_version":1,"facts":{}}', None])
def test_a_damaged_description_is_repaired(root, content):
    """It is for people; chunks stay usable, and the next open writes it again."""
    key = prefix("described", 1)[0]
    with open_store(root) as store:
        put(store, key)
    good = description(root).read_bytes()
    if content is None:
        description(root).unlink()
    else:
        description(root).write_bytes(content)
    with open_store(root) as store:
        assert holds(store, key)
    assert description(root).read_bytes() == good


def test_a_directory_in_the_descriptions_place_is_a_warning(root):
    """Odd, but the store works."""
    (description(root) / "x").mkdir(parents=True)
    with open_store(root) as store:
        assert any("namespace.json" in warning for warning in store.warnings)
        assert put(store, prefix("odd", 1)[0]).kept
