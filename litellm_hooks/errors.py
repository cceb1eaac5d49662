"""The one error for what a person can put right."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting of the hook, or what it points at, cannot work.

    The message names the setting, what was found, what is allowed and what to do; the proxy does not start with it.
    """

    def __init__(self, setting: str, found: str, allowed: str, todo: str) -> None:
        self.setting, self.found, self.allowed, self.todo = setting, found, allowed, todo
        super().__init__(f"{setting}: found {found}; allowed: {allowed}. {todo}")
