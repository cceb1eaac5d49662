"""New text for a file: the patches' edits made, every other byte as it was."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Sequence
from functools import lru_cache

from kvpatches.catalog import Kind, Patch, get
from kvpatches.errors import UnknownCode
from kvpatches.judge import Site, State, Verdict, judge, marker
from kvpatches.pattern import dedented, fill
from kvpatches.source import NotEditable, NotReadable, Source, Splice


def read(data: bytes, file: str) -> Source:
    """Parse a file. Raises UnknownCode where it is damaged."""
    try:
        return Source(data)
    except NotReadable as err:
        raise UnknownCode(file, f"a file that {err}", "vLLM's own source file", "Reinstall vLLM.") from err


def rewrite(data: bytes, steps: Iterable[tuple[Patch, str | None]]) -> bytes:
    """`data` after each step, a patch's own edits (option None) or those of one of its options.

    Steps that have nothing to do (applied, fixed, not affected) leave it alone. Raises UnknownCode where a step does
    not recognise the code, or where the outcome would not be what it has to be; nothing is returned then.
    """
    for patch, option in steps:
        data = _step(data, patch.id, option)
    return data


@lru_cache(maxsize=32)
def _step(data: bytes, patch_id: str, option: str | None) -> bytes:
    """One step. Cached, since checking first, doing it and recording it ask for the same step of the same bytes."""
    patch = get(patch_id)
    source = read(data, patch.file)
    verdict = judge(patch, source, option)
    if verdict.state is State.UNKNOWN_CODE:
        raise unknown(patch, verdict)
    return _edited(patch, source, option, verdict) if verdict.state is State.NEEDED else data


def unknown(patch: Patch, verdict: Verdict) -> UnknownCode:
    """The refusal that names the function and what was expected of it."""
    return UnknownCode(
        f"{patch.id} on {patch.file}",
        verdict.detail,
        f"code as in the releases {patch.affected[0]} to {patch.affected[-1]}, with or without this patch, or as in "
        f"{patch.fixed} and later",
        "Nothing was changed. Reinstall vLLM if the file was edited; if it is a newer or vendor build, report it.",
    )


def _edited(patch: Patch, source: Source, option: str | None, verdict: Verdict) -> bytes:
    sites = [s for s in verdict.sites if s.state is State.NEEDED]
    try:
        splices = [splice for site in sites for splice in _splices(patch, source, site)]
    except NotEditable as err:
        raise unknown(patch, Verdict(State.UNKNOWN_CODE, str(err), verdict.sites)) from err
    data = source.spliced(splices)
    _confirm(patch, source, data, option, sites)
    return data


def _splices(patch: Patch, source: Source, site: Site) -> list[Splice]:
    """The changes of one edit, and the comment above the first."""
    assert site.shape is not None and site.match is not None
    function = source.function(site.shape.function)
    assert function is not None
    texts = {
        name: value if isinstance(value, str) else source.text(value)
        for name, value in site.match.bindings.items()
        if isinstance(value, str | ast.expr)
    }
    splices = []
    for name, code in site.shape.replace.items():
        captured = site.match.bindings[name]
        nodes: Sequence[ast.AST] = captured if isinstance(captured, list) else [captured]  # type: ignore[list-item]
        start, end = source.span(nodes[0], nodes[-1])
        newline = source.newline_at(start)
        indent = source.indent_at(start) if isinstance(captured, list) else b""
        kept = {f"${name}": source.data[start:end]} if isinstance(captured, list) else {}
        lines = [kept.get(line) or fill(line, texts).encode("utf-8") for line in dedented(code)]
        splices.append(Splice((start, end), (newline + indent).join(lines)))
    first = min(s.span[0] for s in splices)
    statement_at, _ = source.span(source.innermost_statement(function, first))
    line = source.line_start(statement_at)
    comment = source.indent_at(statement_at) + marker(patch, site.edit).encode("utf-8") + source.newline_at(line)
    if first == statement_at:  # the comment would meet the change at the same offset: make it one splice
        changed = next(s for s in splices if s.span[0] == first)
        splices.remove(changed)
        before = source.data[line:statement_at]
        splices.append(Splice((line, changed.span[1]), comment + before + changed.text))
    else:
        splices.append(Splice((line, line), comment))
    return splices


def _confirm(patch: Patch, old: Source, data: bytes, option: str | None, sites: Sequence[Site]) -> None:
    """The new text compiles, is judged as applied, and differs from the old only inside the edited functions."""
    problem = ""
    try:
        new = Source(data)
        compile(data, patch.file, "exec", dont_inherit=True)
    except (NotReadable, SyntaxError, ValueError) as err:
        problem = f"the patched file would not compile: {err}"
    else:
        after = judge(patch, new, option)
        functions = {s.shape.function for s in sites if s.shape is not None and s.shape.kind is Kind.NEEDED}
        if after.state is not State.APPLIED:
            problem = f"the patched file would be judged {after.state}: {after.detail}"
        elif _outside(old, functions) != _outside(new, functions):
            problem = "the change would reach outside the functions it is meant for"
    if problem:
        raise unknown(patch, Verdict(State.UNKNOWN_CODE, problem, ()))


def _outside(source: Source, functions: set[str]) -> str:
    """The tree of the file with the bodies of `functions` taken out."""
    pruned = Source(source.data)
    for name in functions:
        function = pruned.function(name)
        assert function is not None
        function.body = [copy.copy(ast.Pass())]
    return ast.dump(pruned.tree)
