"""The patches this project carries: one folder each, described by its `patch.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from kvpatches.errors import BadPatch, ConfigError
from kvpatches.pattern import parse_pattern, stored_names

PACKAGE_DIR = Path(__file__).resolve().parent


class Kind(StrEnum):
    """What it means when code has a shape."""

    NEEDED = "needed"  # the defect is there, and the shape says how to mend it
    FIXED = "fixed"  # the defect is mended
    OLD = "old"  # from before the code that has the defect
    NO_SITE = "no-site"  # this generation of the code has no such place, and does not need this edit


@dataclass(frozen=True)
class Condition:
    """A pattern that must be found (or must not be) in a function."""

    function: str
    code: str


@dataclass(frozen=True)
class Shape:
    """One way in which a site can be written, and what it means."""

    kind: Kind
    releases: str
    function: str
    code: str
    also: tuple[Condition, ...]
    lacks: tuple[Condition, ...]
    replace: Mapping[str, str]


@dataclass(frozen=True)
class Edit:
    """One site to change: the function it is in, why, and every shape it is known to have."""

    name: str
    function: str
    why: str
    option: str | None
    shapes: tuple[Shape, ...]


@dataclass(frozen=True)
class Patch:
    """One upstream fix, carried until it is released."""

    id: str
    revision: int
    title: str
    fixes: str
    issue: str
    pull: str
    file: str
    affected: tuple[str, ...]
    fixed: str
    requires: tuple[str, ...]
    options: Mapping[str, str]
    edits: tuple[Edit, ...]
    folder: Path

    def edits_for(self, option: str | None) -> tuple[Edit, ...]:
        return tuple(e for e in self.edits if e.option == option)


def catalog_dir() -> Path:
    """Folder of patch folders: inside the installed package, beside it in a checkout."""
    installed = PACKAGE_DIR / "catalog"
    return installed if installed.is_dir() else PACKAGE_DIR.parent


@cache
def catalog() -> tuple[Patch, ...]:
    """All patches, each after those it requires."""
    by_id = {p.id: p for p in map(load, sorted(catalog_dir().glob("*/patch.toml")))}
    ordered: dict[str, Patch] = {}

    def add(patch: Patch) -> None:
        for required in patch.requires:
            if required not in by_id:
                raise BadPatch(f"{patch.id} requires {required}, which is not in {catalog_dir()}")
            add(by_id[required])
        ordered.setdefault(patch.id, patch)

    for patch in by_id.values():
        add(patch)
    return tuple(ordered.values())


def get(patch_id: str) -> Patch:
    """The patch of this id. Raises ConfigError with the known ids."""
    known = {p.id: p for p in catalog()}
    if patch_id not in known:
        raise ConfigError("patch", repr(patch_id), ", ".join(known), "`kvpatches status` lists them.")
    return known[patch_id]


def load(path: Path) -> Patch:
    """Read and check one `patch.toml`. Raises BadPatch."""
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    try:
        edits = tuple(_edit(e) for e in raw["edit"])
        patch = Patch(
            id=raw["id"],
            revision=raw["revision"],
            title=raw["title"],
            fixes=raw["fixes"].strip(),
            issue=raw["upstream"]["issue"],
            pull=raw["upstream"]["pull"],
            file=raw["file"],
            affected=tuple(raw["releases"]["affected"]),
            fixed=raw["releases"]["fixed"],
            requires=tuple(raw.get("requires", ())),
            options=raw.get("options", {}),
            edits=edits,
            folder=path.parent,
        )
    except (KeyError, TypeError) as err:
        raise BadPatch(f"{path}: {err!r}") from err
    if patch.id != path.parent.name:
        raise BadPatch(f"{path}: the id {patch.id} is not the folder's name")
    if undeclared := {e.option for e in edits} - {None, *patch.options}:
        raise BadPatch(f"{path}: options without a description: {undeclared}")
    return patch


def _edit(raw: Mapping[str, Any]) -> Edit:
    return Edit(
        name=raw["name"],
        function=raw["function"],
        why=raw["why"],
        option=raw.get("option"),
        shapes=tuple(_shape(s, raw["function"]) for s in raw["shape"]),
    )


def _shape(raw: Mapping[str, Any], function: str) -> Shape:
    where = raw.get("function", function)
    shape = Shape(
        kind=Kind(raw["kind"]),
        releases=raw["releases"],
        function=where,
        code=raw["code"],
        also=tuple(_condition(c, where) for c in raw.get("also", ())),
        lacks=tuple(_condition(c, where) for c in raw.get("lacks", ())),
        replace=raw.get("replace", {}),
    )
    if (shape.kind is Kind.NEEDED) != bool(shape.replace):
        raise BadPatch(f"shape for {shape.releases} in {where}: `replace` belongs to the kind `needed` and to no other")
    for code in (shape.code, *(c.code for c in (*shape.also, *shape.lacks))):
        parse_pattern(code)
    for code in shape.replace.values():
        stored_names(code)
    return shape


def _condition(raw: str | Mapping[str, str], function: str) -> Condition:
    if isinstance(raw, str):
        return Condition(function, raw)
    return Condition(raw["function"], raw["code"])
