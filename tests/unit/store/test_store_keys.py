"""Keys: digests of fields that cannot be confused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_nvme_backend.store import digest_fields

FIELDS = st.lists(st.one_of(st.text(max_size=4), st.integers(-300, 300), st.binary(max_size=4)), max_size=4)


@given(FIELDS, FIELDS)
def test_two_tuples_of_fields_have_one_key_only_where_they_are_equal(left, right):
    """Neither types, nor separators, nor the split between fields can make two tuples meet."""
    typed = [[(type(field), field) for field in fields] for fields in (left, right)]
    assert (digest_fields(*left) == digest_fields(*right)) == (typed[0] == typed[1])


def test_a_character_that_moves_to_the_next_field_changes_the_key():
    """("a", "bc") is not ("ab", "c")."""
    assert (
        len({digest_fields("a", "bc"), digest_fields("ab", "c"), digest_fields("abc"), digest_fields("abc", "")}) == 4
    )


def test_a_key_is_the_same_in_every_process_and_release():
    """Keys name files: a change here would lose every cache."""
    assert digest_fields("model@x", 1, b"\x00").hex() == "bcfdba260d5c5d2395c5718633f779f8"


@pytest.mark.parametrize("field", [True, 1.0, None, ("a",)])
def test_other_types_are_refused(field):
    """True would otherwise be 1."""
    with pytest.raises(TypeError):
        digest_fields(field)


def test_any_text_of_a_request_can_be_a_field():
    """Lone surrogates, NULs and slashes come from requests; none of them raises."""
    assert len({digest_fields(text) for text in ("\ud800", "../..", "a\x00b", "x" * 300, "é")}) == 5
