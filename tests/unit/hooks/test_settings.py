"""The hook's settings and what is said of wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from litellm_hooks.errors import ConfigError
from litellm_hooks.settings import Settings, load_settings


def test_nothing_set_is_the_default() -> None:
    """Without settings, or with those of other callbacks only, every setting has its default."""
    assert load_settings(None, {}) == Settings()
    assert load_settings({"otel": {"message_logging": False}}, {}) == Settings()


def test_environment_wins_over_the_file() -> None:
    """A variable overrides the file's value, and its text is read as the setting's type."""
    found = load_settings(
        {"prefix_affinity": {"load_bound": 2, "response_headers": False}},
        {"PREFIX_AFFINITY_LOAD_BOUND": "1.5", "PREFIX_AFFINITY_RESPONSE_HEADERS": "true", "PATH": "/bin"},
    )
    assert (found.load_bound, found.response_headers) == (1.5, True)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"load_bond": 1.5}, ["callback_settings.prefix_affinity.load_bond", "load_bound"]),
        ({"load_bound": 0.9}, ["load_bound", "0.9", "at least 1"]),
        ({"load_bound": "much"}, ["load_bound", "'much'", "a number"]),
        ({"load_bound": True}, ["load_bound", "True"]),
        ({"load_bound": float("nan")}, ["load_bound", "nan"]),
        ({"load_bound": float("inf")}, ["load_bound", "inf"]),
        ({"load_bound": None}, ["load_bound", "None"]),
        ({"table_entries": 10}, ["table_entries", "at least 1000"]),
        ({"table_entries": 1e4 + 0.5}, ["table_entries", "a whole number"]),
        ({"isolate_by": "tenant"}, ["isolate_by", "none, key, team, user"]),
        ({"strip_billing_header": "yes"}, ["strip_billing_header", "true or false"]),
        ({"decision_log": 7}, ["decision_log", "7"]),
        ("fast", ["callback_settings.prefix_affinity", "'fast'"]),
    ],
)
def test_wrong_setting_is_named(section: Any, words: list[str]) -> None:
    """The error names the setting, what was found, what is allowed and what to do."""
    with pytest.raises(ConfigError) as caught:
        load_settings({"prefix_affinity": section}, {})
    for word in words:
        assert word in str(caught.value)


def test_misspelled_section_is_named() -> None:
    """A section that is nearly called like this one is an error, not a proxy without settings."""
    with pytest.raises(ConfigError, match="prefix_afinity"):
        load_settings({"prefix_afinity": {"load_bound": 2}}, {})


@pytest.mark.parametrize(("key", "text"), [("PREFIX_AFFINITY_LOAD_BOND", "2"), ("PREFIX_AFFINITY_LOAD_BOUND", "x")])
def test_wrong_variable_is_named(key: str, text: str) -> None:
    """Unknown variables of this prefix and values of the wrong type are errors that name the variable."""
    with pytest.raises(ConfigError, match=key):
        load_settings(None, {key: text})
