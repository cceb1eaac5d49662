"""The parts of LMCache's door that need no LMCache: settings, marks, seals, places in a prefix."""

from __future__ import annotations

import os
import re

import pytest

from lmcache_nvme_backend.doors.mp.identity import ModelIdentities, Unproven, digest_of, marked, split_mark
from lmcache_nvme_backend.doors.mp.params import parse_params
from lmcache_nvme_backend.doors.mp.prefixes import UNKNOWN_DEPTH, PrefixBook
from lmcache_nvme_backend.doors.mp.sealed import SEAL_BYTES, is_whole, seal_of
from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.store import digest_fields

PARAMS = {"root_dir": "/mnt/kv", "quota_gib": 100}


def test_params_are_the_tiers_settings_without_a_prefix():
    """The same names and defaults as everywhere, with root_dir for the path."""
    found = parse_params({**PARAMS, "io_threads": 8, "direct_io": False})
    assert (found.tier.path, found.tier.quota_gib, found.tier.io_threads) == ("/mnt/kv", 100, 8)
    assert (found.tier.direct_io, found.unmarked_models, found.behind) == ("off", "refuse", None)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"root_dir": None}, "root_dir"),
        ({"path": "/x"}, "root_dir"),
        ({"quota_gb": 1}, "Did you mean quota_gib"),
        ({"self_test": "off"}, "self_test"),
        ({"store_wait_ms": 1}, "store_wait_ms"),
        ({"unmarked_models": "trust"}, "unmarked_models"),
        ({"behind_timeout_s": 0}, "behind_timeout_s"),
        ({"behind": []}, "behind"),
    ],
)
def test_a_wrong_param_is_named_as_it_was_written(wrong, named):
    """The nearest known name, what was found, what is allowed; never a prefix that this door does not have."""
    with pytest.raises(ConfigError, match=named) as caught:
        parse_params({**PARAMS, **wrong})
    assert not re.search(r"\bnvme\.\w", str(caught.value))


def test_a_mark_survives_in_a_name_and_what_comes_behind_it_counts():
    """The name comes back; a layout that LMCache adds behind the mark is another identity."""
    digest = digest_of({"model": "weights:1"})
    name = marked("org/model", digest)
    identities = ModelIdentities("", by_path=False)
    assert split_mark(name) == ("org/model", digest) and split_mark("org/model") == ("org/model", None)
    assert identities.of(name) == f"engine:{digest}"
    assert identities.of(marked("elsewhere/model", digest)) == identities.of(name)
    assert identities.of(f"{name}-dcp2") != identities.of(name)
    assert identities.of(marked("org/model-dcp2", digest)) != identities.of(f"{name}-dcp2")


def test_a_marks_digest_is_of_every_fact():
    """Another value, another name of a fact, or one fact more is another mark; their order is not."""
    assert digest_of({"a": 1, "b": [2]}) == digest_of({"b": [2], "a": 1})
    assert len({digest_of(facts) for facts in ({"a": 1}, {"a": "1"}, {"b": 1}, {"a": 1, "b": None})}) == 4


def test_an_unmarked_name_is_unproven_unless_the_user_says_otherwise(tmp_path):
    """Refused by default; a given word is taken for each name apart; by path it is the weights that count."""
    with pytest.raises(Unproven, match=r"kvtier\.identity"):
        ModelIdentities("", by_path=False).of("org/model")
    given = ModelIdentities("v1", by_path=False)
    assert given.of("a") != given.of("b")
    by_path = ModelIdentities("", by_path=True)
    (tmp_path / "model.bin").write_bytes(os.urandom(5000))
    assert by_path.of(str(tmp_path)).startswith("weights:")
    with pytest.raises(Unproven, match="cannot be identified"):
        by_path.of("org/no-such-model")


NAMESPACE = bytes(range(16))


def sealed(payload: bytes, key: str = "k", namespace: bytes = NAMESPACE) -> bytearray:
    return bytearray(payload + seal_of(memoryview(payload), digest_fields(key), namespace))


def test_a_seal_holds_for_its_name_alone():
    """The same bytes under another key, or of another namespace, are not whole."""
    whole = memoryview(sealed(b"payload" * 100))
    assert is_whole(whole, digest_fields("k"), NAMESPACE)
    assert not is_whole(whole, digest_fields("other"), NAMESPACE)
    assert not is_whole(whole, digest_fields("k"), bytes(16))
    assert not is_whole(memoryview(bytes(len(whole))), digest_fields("k"), NAMESPACE)


def test_every_flipped_bit_breaks_the_seal():
    """Of the payload and of the seal itself."""
    good = sealed(b"some bytes of KV")
    for position in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            assert not is_whole(memoryview(bad), digest_fields("k"), NAMESPACE), (position, bit)


def test_a_prefix_that_was_cut_short_or_moved_is_not_whole():
    """A value that ends early, or a shorter payload with the longer one's seal."""
    good = bytes(sealed(b"0123456789" * 10))
    for cut in (1, 10, SEAL_BYTES, len(good) - SEAL_BYTES):
        assert not is_whole(memoryview(good[cut:]), digest_fields("k"), NAMESPACE)
    assert not is_whole(memoryview(good[:-1] + b"\0"), digest_fields("k"), NAMESPACE)


def test_places_go_on_where_a_prefix_was_known_before():
    """A lookup of the rest alone keeps the rest in its place, and tells what lies before it."""
    book = PrefixBook()
    keys = [digest_fields(i) for i in range(6)]
    assert book.note(keys[:4]) == []
    assert [book.place(key) for key in keys[:4]] == [(i, keys[i - 1] if i else None) for i in range(4)]
    assert book.note(keys[2:]) == keys[:2]
    assert book.place(keys[5]) == (5, keys[4])
    assert book.place(digest_fields("never seen")) == (UNKNOWN_DEPTH, None)
