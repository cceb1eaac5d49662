"""Patterns over Python syntax trees: code with holes.

A pattern is Python source in which
  `$name`          stands for one expression (or a name); the same hole twice must hold equal code,
  `$name(code)`    is an expression that looks like `code`, captured under `name`,
  `with $name:`    captures the statements below it under `name` (in a replacement, a line `$name` is what it captured),
  `$$name`         stands for any number of statements, or as a call's last positional for whatever else it is given.
Comments, blank lines, quotes, parentheses and line breaks do not exist in a syntax tree, so they never matter.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from kvpatches.errors import BadPatch

_ONE = "__hole_"
_MANY = "__holes_"
_HOLE = re.compile(r"(\$\$?)([a-z_][a-z0-9_]*)")
_IGNORED_FIELDS = frozenset({"ctx", "type_comment", "type_ignores", "kind"})

Bound = ast.AST | list[ast.stmt] | str
Bindings = Mapping[str, Bound]


@dataclass(frozen=True)
class Match:
    """Where a pattern was found: the nodes it covers, and what its holes and captures hold."""

    nodes: tuple[ast.AST, ...]
    bindings: Bindings


@cache
def parse_pattern(code: str) -> list[ast.stmt]:
    """The statements of a pattern, not to be changed. Raises BadPatch where it is not Python."""
    plain = _HOLE.sub(lambda m: (_MANY if m[1] == "$$" else _ONE) + m[2], "\n".join(dedented(code)))
    try:
        return ast.parse(plain).body
    except SyntaxError as err:
        raise BadPatch(f"pattern is not Python ({err}):\n{code}") from err


def dedented(code: str) -> list[str]:
    """The lines of a pattern or replacement, without the indentation they share."""
    return textwrap.dedent(code).strip("\n").split("\n")


def fill(line: str, texts: Mapping[str, str]) -> str:
    """`line` with each `$name` replaced by its text."""

    def text(match: re.Match[str]) -> str:
        try:
            return texts[match[2]]
        except KeyError:
            raise BadPatch(f"replacement uses ${match[2]}, which the pattern does not bind: {line}") from None

    return _HOLE.sub(text, line)


def substitute(pattern: list[ast.stmt], replacements: Mapping[str, str]) -> list[ast.stmt]:
    """The pattern that finds what `replacements` (capture name to replacement code) leave behind."""
    return _Substitute(replacements).block([ast.parse(ast.unparse(s)).body[0] for s in pattern])


def find(pattern: list[ast.stmt], root: ast.AST, bindings: Bindings | None = None) -> list[Match]:
    """Every place under `root` where the pattern holds, in source order."""
    start: dict[str, Bound] = dict(bindings or {})
    single = pattern[0] if len(pattern) == 1 else None
    if isinstance(single, ast.Expr) and _hole(single.value) is None:
        nodes = (n for n in ast.walk(root) if isinstance(n, ast.expr))
        return [Match((n,), b) for n in nodes if (b := _node(single.value, n, start)) is not None]
    matches = []
    for block in statement_lists(root):
        for first in range(len(block)):
            for bound, end in _run(pattern, block, first, start):
                matches.append(Match(tuple(block[first:end]), bound))
                break
    return matches


def statement_lists(root: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements below `root`, outermost first."""
    for node in ast.walk(root):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


def stored_names(code: str) -> set[str]:
    """Plain names that a replacement assigns: they must be new to the function they go into."""
    names = {n.id for s in parse_pattern(code) for n in ast.walk(s) if isinstance(n, ast.Name) and _stores(n)}
    return {n for n in names if not n.startswith((_ONE, _MANY))}


def _stores(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _hole(node: object) -> str | None:
    """Name of the single hole that `node` is, if it is one."""
    text = node.id if isinstance(node, ast.Name) else node
    return text.removeprefix(_ONE) if isinstance(text, str) and text.startswith(_ONE) else None


def _holes(node: object) -> str | None:
    """Name of the many-hole that `node` is (a statement or an argument), if it is one."""
    inner = node.value if isinstance(node, ast.Expr) else node
    return inner.id.removeprefix(_MANY) if isinstance(inner, ast.Name) and inner.id.startswith(_MANY) else None


def _captured_expression(node: object) -> tuple[str, ast.expr] | None:
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        name = _hole(node.func)
        return (name, node.args[0]) if name is not None else None
    return None


def _captured_block(node: ast.stmt) -> tuple[str, list[ast.stmt]] | None:
    if isinstance(node, ast.With) and len(node.items) == 1:
        name = _hole(node.items[0].context_expr)
        return (name, node.body) if name is not None else None
    return None


def _bind(bindings: dict[str, Bound], name: str, value: Bound) -> dict[str, Bound] | None:
    if name in bindings:
        return bindings if _equal(bindings[name], value) else None
    return {**bindings, name: value}


def _equal(left: object, right: object) -> bool:
    if isinstance(left, ast.AST) and isinstance(right, ast.AST):
        return type(left) is type(right) and all(
            _equal(getattr(left, f, None), getattr(right, f, None)) for f in left._fields if f not in _IGNORED_FIELDS
        )
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    return type(left) is type(right) and left == right


def _run(
    pattern: list[ast.stmt], block: list[ast.stmt], at: int, bindings: dict[str, Bound]
) -> Iterator[tuple[dict[str, Bound], int]]:
    """Ways in which the pattern covers `block[at:end]`, as (bindings, end)."""
    if not pattern:
        yield bindings, at
        return
    head, rest = pattern[0], pattern[1:]
    if (name := _holes(head)) is not None:
        for end in range(at, len(block) + 1):
            if (bound := _bind(bindings, name, block[at:end])) is not None:
                yield from _run(rest, block, end, bound)
    elif (capture := _captured_block(head)) is not None:
        name, inner = capture
        for inner_bound, end in _run(inner, block, at, bindings):
            if (bound := _bind(inner_bound, name, block[at:end])) is not None:
                yield from _run(rest, block, end, bound)
    elif at < len(block) and (bound := _node(head, block[at], bindings)) is not None:
        yield from _run(rest, block, at + 1, bound)


def _node(pattern: object, node: object, bindings: dict[str, Bound]) -> dict[str, Bound] | None:
    """Bindings under which `node` looks like `pattern`, or None."""
    if (name := _hole(pattern)) is not None:
        return _bind(bindings, name, node) if isinstance(node, ast.expr | str) else None
    if (capture := _captured_expression(pattern)) is not None:
        name, inner = capture
        bound = _node(inner, node, bindings)
        return None if bound is None or not isinstance(node, ast.expr) else _bind(bound, name, node)
    if isinstance(pattern, ast.AST):
        if type(pattern) is not type(node):
            return None
        if isinstance(pattern, ast.Call) and pattern.args and _holes(pattern.args[-1]) is not None:
            assert isinstance(node, ast.Call)
            return _open_call(pattern, node, bindings)
        for field in pattern._fields:
            if field in _IGNORED_FIELDS:
                continue
            if (bound := _field(getattr(pattern, field, None), getattr(node, field, None), bindings)) is None:
                return None
            bindings = bound
        return bindings
    return bindings if type(pattern) is type(node) and pattern == node else None


def _field(pattern: object, value: object, bindings: dict[str, Bound]) -> dict[str, Bound] | None:
    if not isinstance(pattern, list):
        return _node(pattern, value, bindings)
    if not isinstance(value, list):
        return None
    if pattern and isinstance(pattern[0], ast.stmt):
        return next((bound for bound, end in _run(pattern, value, 0, bindings) if end == len(value)), None)
    if len(pattern) != len(value):
        return None
    for part, node in zip(pattern, value, strict=True):
        if (bound := _node(part, node, bindings)) is None:
            return None
        bindings = bound
    return bindings


def _open_call(pattern: ast.Call, node: ast.Call, bindings: dict[str, Bound]) -> dict[str, Bound] | None:
    """A call whose pattern ends in `$$name`: what the pattern names must be there, and more may be."""
    fixed = pattern.args[:-1]
    bound = _node(pattern.func, node.func, bindings)
    if bound is None or len(node.args) < len(fixed):
        return None
    for part, arg in zip(fixed, node.args, strict=False):
        if (bound := _node(part, arg, bound)) is None:
            return None
    given = {k.arg: k.value for k in node.keywords}
    for keyword in pattern.keywords:
        if keyword.arg not in given or (bound := _node(keyword.value, given[keyword.arg], bound)) is None:
            return None
    return bound


class _Substitute(ast.NodeTransformer):
    """Puts replacement patterns where a pattern captures."""

    def __init__(self, replacements: Mapping[str, str]) -> None:
        self._replacements = {name: parse_pattern(code) for name, code in replacements.items()}

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        result: list[ast.stmt] = []
        for statement in statements:
            new = self.visit(statement)
            result.extend(new if isinstance(new, list) else [new])
        return result

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:
        capture = _captured_block(node)
        if capture is None:
            return self.generic_visit(node)
        name, inner = capture
        kept = self.block(inner)
        if name not in self._replacements:
            return kept
        new: list[ast.stmt] = []
        for statement in self._replacements[name]:
            stays = isinstance(statement, ast.Expr) and _hole(statement.value) == name
            new.extend(kept if stays else [statement])
        return new

    def visit_Call(self, node: ast.Call) -> ast.AST:
        capture = _captured_expression(node)
        if capture is None:
            return self.generic_visit(node)
        name, inner = capture
        if name not in self._replacements:
            replaced = self.visit(inner)
            assert isinstance(replaced, ast.AST)
            return replaced
        replacement = self._replacements[name]
        if len(replacement) != 1 or not isinstance(replacement[0], ast.Expr):
            raise BadPatch(f"${name}(…) captures an expression and needs an expression as its replacement")
        return replacement[0].value
