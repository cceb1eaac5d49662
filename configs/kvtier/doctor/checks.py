"""A check's outcome."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Status(StrEnum):
    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check: what was found, and the command that mends it where it did not pass."""

    name: str
    status: Status
    sentence: str
    fix: str | None = None


def passed(name: str, sentence: str) -> Check:
    return Check(name=name, status=Status.PASS, sentence=sentence)


def warned(name: str, sentence: str, fix: str | None = None) -> Check:
    return Check(name=name, status=Status.WARN, sentence=sentence, fix=fix)


def failed(name: str, sentence: str, fix: str | None = None) -> Check:
    return Check(name=name, status=Status.FAIL, sentence=sentence, fix=fix)


def judged(name: str, good: bool, right: str, wrong: str, fix: str | None = None, *, hard: bool = True) -> Check:
    """Pass, or fail (warn where it is not `hard`)."""
    if good:
        return passed(name, right)
    return failed(name, wrong, fix) if hard else warned(name, wrong, fix)
