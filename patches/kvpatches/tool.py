"""The four commands as functions: status, apply, revert, diff."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpatches import site as sites
from kvpatches.catalog import Patch, catalog, get
from kvpatches.errors import ConfigError, UnknownCode
from kvpatches.judge import State, Verdict, judge, markers
from kvpatches.record import Beside, Record, digest
from kvpatches.replace import drop_stale_bytecode, locked, replace_file
from kvpatches.rewrite import read, rewrite, unknown
from kvpatches.site import InstalledVllm
from kvpatches.source import NotReadable, Source

Site = str | Path | None


@dataclass(frozen=True)
class PatchStatus:
    """Where one installation stands with one patch.

    `revision` is set where this tool made the change; `options` has the state of each of the patch's switches.
    """

    id: str
    title: str
    state: State
    detail: str
    revision: int | None
    options: Mapping[str, State]
    file: Path | None
    version: str | None


@dataclass(frozen=True)
class Outcome:
    """What apply or revert did to one file. Nothing where `changed` is false."""

    file: Path
    changed: bool
    patches: tuple[str, ...]
    bytecode_removed: tuple[Path, ...] = ()


def status(site: Site = None) -> list[PatchStatus]:
    """The state of every patch for the vLLM in `site` (default: the one this interpreter imports).

    Never raises for what it finds there: no vLLM is a state, and so is code it does not know.
    """
    try:
        vllm = sites.locate(site)
    except ConfigError as err:
        return [_status(p, Verdict(State.NOT_INSTALLED, str(err), ()), {}, None) for p in catalog()]
    return [_judged(patch, vllm) for patch in catalog()]


def apply(ids: Sequence[str] = (), site: Site = None, options: Iterable[str] = ()) -> list[Outcome]:
    """Make the change of the named patches (default: all), of those they require, and of the named options.

    Everything is judged before anything is written, and a patch that is applied, fixed upstream or not needed is left
    alone. Raises UnknownCode, NotInstalled, or ConfigError (cannot be written); nothing has been changed then.
    """
    vllm = sites.locate(site)
    plan = _plan(_selected(ids), tuple(options))
    outcomes = []
    _check_all(vllm, plan)
    for file, steps in plan.items():
        path = vllm.file(file)
        if path.is_file():
            outcomes.append(_apply_to(path, steps))
    return outcomes


def revert(ids: Sequence[str] = (), site: Site = None) -> list[Outcome]:
    """Take back the named patches with their options (default: all): without any, the file is the original again.

    Raises ConfigError where another patch still needs a named one, where the file is not what this tool left, or
    where the backup is gone; nothing has been changed then.
    """
    vllm = sites.locate(site)
    chosen = {p.id for p in (map(get, ids) if ids else catalog())}
    for patch in catalog():
        if patch.id not in chosen and (still := chosen & set(patch.requires)) and _is_ours(patch, vllm):
            raise ConfigError(
                "revert",
                ", ".join(sorted(still)),
                f"patches that nothing needs; {patch.id} does",
                f"Name {patch.id} too.",
            )
    files = dict.fromkeys(p.file for p in catalog() if p.id in chosen)
    return [_revert_on(vllm.file(f), chosen) for f in files if vllm.file(f).is_file()]


def diff(ids: Sequence[str] = (), site: Site = None, options: Iterable[str] = ()) -> str:
    """The unified diff that `apply` would make; empty where it has nothing to do. Raises as `apply` does."""
    vllm = sites.locate(site)
    plan = _plan(_selected(ids), tuple(options))
    _check_all(vllm, plan)
    parts: list[str] = []
    for file, steps in plan.items():
        path = vllm.file(file)
        if not path.is_file():
            continue
        old = path.read_bytes()
        new = rewrite(old, steps)
        parts.extend(
            difflib.unified_diff(
                old.decode("utf-8").splitlines(keepends=True),
                new.decode("utf-8").splitlines(keepends=True),
                f"a/{file}",
                f"b/{file}",
            )
        )
    return "".join(parts)


_Plan = dict[str, list[tuple[Patch, str | None]]]


def _selected(ids: Sequence[str]) -> list[Patch]:
    """The named patches with what they require, requirements first."""
    if not ids:
        return list(catalog())
    wanted = {get(i).id for i in ids}
    while more := {r for p in catalog() if p.id in wanted for r in p.requires} - wanted:
        wanted |= more
    return [p for p in catalog() if p.id in wanted]


def _plan(patches: Sequence[Patch], options: Sequence[str]) -> _Plan:
    """File to the steps to make in it. Raises ConfigError for an option that no selected patch has."""
    known = {o for p in patches for o in p.options}
    for option in options:
        if option not in known:
            raise ConfigError(
                "--with", repr(option), ", ".join(sorted(known)) or "nothing", "`show` lists the options."
            )
    plan: _Plan = {}
    for patch in patches:
        chosen = [o for o in patch.options if o in options]
        plan.setdefault(patch.file, []).extend([(patch, None), *((patch, o) for o in chosen)])
    return plan


def _check_all(vllm: InstalledVllm, plan: _Plan) -> None:
    """Raise UnknownCode before anything is touched where any step would have to refuse."""
    for file, steps in plan.items():
        path = vllm.file(file)
        if path.is_file():
            rewrite(path.read_bytes(), steps)
        else:
            for patch, _ in steps:
                verdict = _without_file(patch, vllm)
                if verdict.state is State.UNKNOWN_CODE:
                    raise unknown(patch, verdict)


def _apply_to(path: Path, steps: Sequence[tuple[Patch, str | None]]) -> Outcome:
    before = path.read_bytes()
    if rewrite(before, steps) == before:
        removed = drop_stale_bytecode(path)
        return Outcome(path, bool(removed), (), tuple(removed))
    beside = Beside(path)
    with locked(beside.lock):
        current = path.read_bytes()
        new = rewrite(current, steps)
        if new == current:
            return Outcome(path, False, (), tuple(drop_stale_bytecode(path)))
        record = beside.read_record()
        present = record.steps(current) if record is not None else None
        if record is None or present is None:
            _refuse_unrecorded(path, current)
            record, present = Record(digest(current)), ()
        if not present:
            replace_file(beside.backup, current, like=path)
        beside.read_original(record)
        made = [*present, *_made(current, steps)]
        replace_file(beside.record, record.with_content(new, made).encode(), like=path)
        replace_file(path, new)
        removed = drop_stale_bytecode(path)
        _confirm(path, new)
    return Outcome(path, True, tuple(dict.fromkeys(i for i, _ in made[len(present) :])), tuple(removed))


def _made(current: bytes, steps: Sequence[tuple[Patch, str | None]]) -> list[tuple[str, str | None]]:
    """Those steps that have something to do."""
    made = []
    for patch, option in steps:
        if (after := rewrite(current, [(patch, option)])) != current:
            made.append((patch.id, option))
        current = after
    return made


def _refuse_unrecorded(path: Path, current: bytes) -> None:
    if found := markers(current.decode("utf-8", errors="replace")):
        raise ConfigError(
            str(path),
            f"changes by this tool ({', '.join(sorted({i for i, _, _ in found}))}) without a record that fits the file",
            "an untouched file, or one with its record",
            "Nothing was changed. Reinstall vLLM, then apply again.",
        )


def _revert_on(path: Path, chosen: set[str]) -> Outcome:
    beside = Beside(path)
    if not markers(path.read_bytes().decode("utf-8", errors="replace")):
        return Outcome(path, False, ())
    with locked(beside.lock):
        current = path.read_bytes()
        record = beside.read_record()
        steps = record.steps(current) if record is not None else None
        if record is None or steps is None:
            if not markers(current.decode("utf-8", errors="replace")):
                return Outcome(path, False, ())
            raise ConfigError(
                str(path),
                "a file that was changed after this tool patched it, or that lost its record",
                "the file as this tool left it",
                "Nothing was changed. Reinstall vLLM to get its own file back.",
            )
        kept = [(i, o) for i, o in steps if i not in chosen]
        undone = tuple(dict.fromkeys(i for i, _ in steps if i in chosen))
        if not undone:
            return Outcome(path, False, ())
        original = beside.read_original(record)
        new = rewrite(original, [(get(i), o) for i, o in kept])
        if kept:
            replace_file(beside.record, record.with_content(new, kept).encode(), like=path)
        replace_file(path, new)
        removed = drop_stale_bytecode(path)
        _confirm(path, new)
        if not kept:
            beside.record.unlink(missing_ok=True)
            beside.backup.unlink(missing_ok=True)
    return Outcome(path, True, undone, tuple(removed))


def _confirm(path: Path, expected: bytes) -> None:
    if path.read_bytes() != expected:
        raise ConfigError(
            str(path), "other content than was just written", "the patched file", "Look for another writer."
        )


def _judged(patch: Patch, vllm: InstalledVllm) -> PatchStatus:
    path = vllm.file(patch.file)
    if not path.is_file():
        return _status(patch, _without_file(patch, vllm), {}, vllm)
    try:
        source = read(path.read_bytes(), patch.file)
    except OSError as err:
        return _status(patch, Verdict(State.UNKNOWN_CODE, f"cannot be read: {err}", ()), {}, vllm)
    except UnknownCode as err:
        return _status(patch, Verdict(State.UNKNOWN_CODE, err.found, ()), {}, vllm)
    verdict = judge(patch, source)
    options = {option: judge(patch, source, option).state for option in patch.options}
    return _status(patch, verdict, options, vllm)


def _without_file(patch: Patch, vllm: InstalledVllm) -> Verdict:
    """Without the file there is no code to judge, and only then the version decides whether that is old or unknown."""
    first = sites.release(patch.affected[0])
    if vllm.version is not None and sites.release(vllm.version) < first:
        return Verdict(State.NOT_AFFECTED, f"vLLM {vllm.version} is older than {patch.file}", ())
    return Verdict(State.UNKNOWN_CODE, f"no file {patch.file} in vLLM {vllm.version or 'of unknown version'}", ())


def _status(patch: Patch, verdict: Verdict, options: Mapping[str, State], vllm: InstalledVllm | None) -> PatchStatus:
    state, detail = verdict.state, verdict.detail
    if state is State.FIXED_UPSTREAM and vllm is not None and vllm.version in patch.affected:
        # The release of this very version does not have it, so somebody put it in afterwards.
        state, detail = State.APPLIED, f"not by this tool: vLLM {vllm.version} is released without it; {detail}"
    return PatchStatus(
        id=patch.id,
        title=patch.title,
        state=state,
        detail=detail,
        revision=verdict.revision,
        options=options,
        file=vllm.file(patch.file) if vllm is not None else None,
        version=vllm.version if vllm is not None else None,
    )


def _is_ours(patch: Patch, vllm: InstalledVllm) -> bool:
    try:
        source = Source(vllm.file(patch.file).read_bytes())
    except (OSError, NotReadable):
        return False
    return judge(patch, source).revision is not None
