"""What the code at hand says about a patch: judged by its syntax tree, never by a version number."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from enum import StrEnum

from kvpatches.catalog import Condition, Edit, Kind, Patch, Shape
from kvpatches.pattern import Match, find, parse_pattern, stored_names, substitute
from kvpatches.source import Source


class State(StrEnum):
    """Where an installation stands with a patch."""

    NOT_INSTALLED = "not-installed"
    NOT_AFFECTED = "not-affected"
    NEEDED = "needed"
    APPLIED = "applied"
    FIXED_UPSTREAM = "fixed-upstream"
    UNKNOWN_CODE = "unknown-code"


@dataclass(frozen=True)
class Site:
    """What one edit found. `shape` and `match` are set where the edit is needed."""

    edit: Edit
    state: State
    detail: str
    shape: Shape | None = None
    match: Match | None = None
    revision: int | None = None


@dataclass(frozen=True)
class Verdict:
    """What a patch (or one of its options) found over all its edits.

    `revision` is that of the patch found applied by this tool, None for a change that somebody else made.
    """

    state: State
    detail: str
    sites: tuple[Site, ...]
    revision: int | None = None


def marker(patch: Patch, edit: Edit) -> str:
    """The comment that this tool leaves above its change."""
    return f"# kvpatches {patch.id} r{patch.revision} {edit.name}: {edit.why}"


def markers(text: str) -> set[tuple[str, int, str]]:
    """(patch id, revision, edit) of every change by this tool in `text`."""
    return {(m[1], int(m[2]), m[3]) for m in re.finditer(r"# kvpatches (\S+) r(\d+) (\S+):", text)}


def judge(patch: Patch, source: Source, option: str | None = None) -> Verdict:
    """Where `source` stands with the patch's own edits, or with those of one of its options."""
    sites = tuple(_site(patch, edit, source) for edit in patch.edits_for(option))
    unknown = [s for s in sites if s.state is State.UNKNOWN_CODE]
    if unknown:
        return Verdict(State.UNKNOWN_CODE, "; ".join(s.detail for s in unknown), sites)
    present = [s for s in sites if s.shape is None or s.shape.kind is not Kind.NO_SITE]
    states = {s.state for s in present}
    if not states:
        return Verdict(State.NOT_AFFECTED, sites[0].detail, sites)
    if len(states) > 1:
        found = ", ".join(f"{s.edit.name} in {s.edit.function}: {s.state}" for s in present)
        return Verdict(State.UNKNOWN_CODE, f"half patched ({found}); expected all or none", sites)
    revisions = {s.revision for s in present}
    details = dict.fromkeys(s.detail for s in present)
    return Verdict(states.pop(), "; ".join(details), sites, min((r for r in revisions if r is not None), default=None))


def _site(patch: Patch, edit: Edit, source: Source) -> Site:
    places = {s.function for s in edit.shapes if s.kind is Kind.NEEDED}
    marks = {m for p in places if (f := source.function(p)) is not None for m in markers(source.segment(f))}
    mine = {r for i, r, name in marks if i == patch.id and name == edit.name}
    changed = [s for s in edit.shapes if s.kind is Kind.NEEDED and _changed(s, source)]
    if mine:
        if len(mine) == 1 and changed:
            revision = mine.pop()
            return Site(edit, State.APPLIED, f"revision {revision}", changed[0], revision=revision)
        return _unknown(edit, "it carries this tool's mark, and its code is not what the tool writes")
    found = [(s, m) for s in edit.shapes if (m := _match(s, source)) is not None]
    kinds = {s.kind for s, _ in found}
    if changed and kinds <= {Kind.FIXED}:
        return Site(edit, State.FIXED_UPSTREAM, "the code has the fix", changed[0])
    if changed or len(kinds) != 1:
        return _unknown(edit, "shapes that exclude each other" if kinds or changed else _what_differs(edit, source))
    shape, match = found[0]
    if shape.kind is Kind.NEEDED:
        if len(found) > 1:
            return _unknown(edit, "more than one shape fits")
        if clash := _clash(shape, source):
            return _unknown(edit, f"the name {clash} is already in use")
        return Site(edit, State.NEEDED, f"as in {shape.releases}", shape, match)
    state = State.FIXED_UPSTREAM if shape.kind is Kind.FIXED else State.NOT_AFFECTED
    return Site(edit, state, f"as in {shape.releases}", shape)


def _unknown(edit: Edit, found: str) -> Site:
    known = "; ".join(dict.fromkeys(f"{s.kind} as in {s.releases}" for s in edit.shapes))
    return Site(edit, State.UNKNOWN_CODE, f"{edit.function} ({edit.name}): {found}; expected one of: {known}")


def _what_differs(edit: Edit, source: Source) -> str:
    names = dict.fromkeys((edit.function, *(s.function for s in edit.shapes)))
    if not any(source.function(n) is not None for n in names):
        return f"no function {' or '.join(names)}"
    return "code of no known shape"


def _match(shape: Shape, source: Source) -> Match | None:
    """The place where `shape` holds with all its conditions; what is to be changed or is mended has exactly one."""
    function = source.function(shape.function)
    matches = find(parse_pattern(shape.code), function) if function is not None else []
    several = shape.kind in (Kind.OLD, Kind.NO_SITE)
    if not matches or (len(matches) > 1 and not several) or not _conditions(shape, source, matches[0]):
        return None
    return matches[0]


def _changed(shape: Shape, source: Source) -> bool:
    """Whether the code is what this tool makes of `shape`."""
    function = source.function(shape.function)
    if function is None:
        return False
    matches = find(substitute(parse_pattern(shape.code), shape.replace), function)
    return len(matches) == 1 and _conditions(shape, source, matches[0])


def _conditions(shape: Shape, source: Source, match: Match) -> bool:
    return all(_holds(c, source, match) for c in shape.also) and not any(_holds(c, source, match) for c in shape.lacks)


def _holds(condition: Condition, source: Source, match: Match) -> bool:
    function = source.function(condition.function)
    return function is not None and bool(find(parse_pattern(condition.code), function, match.bindings))


def _clash(shape: Shape, source: Source) -> str | None:
    function = source.function(shape.function)
    assert function is not None
    used = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)} | {
        a.arg for a in ast.walk(function) if isinstance(a, ast.arg)
    }
    new = sorted(set().union(*(stored_names(code) for code in shape.replace.values())))
    return next((n for n in new if n in used), None)
