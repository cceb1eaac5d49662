"""What this tool refuses, one class a reason, each with the exit code that a start script sees."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of `python -m kvpatches` and `kvtier patch`. 2 is argparse's own (wrong usage)."""

    OK = 0
    NEEDED = 1
    UNKNOWN_CODE = 3
    CANNOT_CHANGE = 4
    NOT_INSTALLED = 5


class ConfigError(ValueError):
    """A setting, or what it points at, cannot work; nothing has been changed when it is raised.

    The message names the setting, what was found, what is allowed and what to do. `exit_code` is what the command
    line ends with.
    """

    exit_code = Exit.CANNOT_CHANGE

    def __init__(self, setting: str, found: str, allowed: str, todo: str) -> None:
        self.setting, self.found, self.allowed, self.todo = setting, found, allowed, todo
        super().__init__(f"{setting}: found {found}; allowed: {allowed}. {todo}")


class UnknownCode(ConfigError):
    """The code at hand has none of the shapes that the patch knows. Nothing was changed."""

    exit_code = Exit.UNKNOWN_CODE


class NotInstalled(ConfigError):
    """There is no vLLM where the tool looked."""

    exit_code = Exit.NOT_INSTALLED


class BadPatch(Exception):
    """A patch folder of this project is wrong. A bug, never the user's fault."""
