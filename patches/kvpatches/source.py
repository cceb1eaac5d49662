"""One Python source file as bytes and as a syntax tree, and edits that leave every other byte alone."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Span = tuple[int, int]


class NotReadable(Exception):
    """The bytes are not Python that this interpreter can parse, or not UTF-8."""


class NotEditable(Exception):
    """The place to change is written in a way that a byte-exact edit cannot serve."""


@dataclass(frozen=True)
class Splice:
    """Replace the bytes of `span` by `text`."""

    span: Span
    text: bytes


class Source:
    """A parsed file. Raises NotReadable at construction."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            # Column offsets of the syntax tree count UTF-8 bytes, so only such a file can be spliced.
            if encoding not in ("utf-8", "utf-8-sig"):
                raise NotReadable(f"is encoded in {encoding}, not UTF-8")
            data.decode(encoding)
            self.tree = ast.parse(data)
        except (SyntaxError, ValueError, RecursionError) as err:
            raise NotReadable(f"cannot be parsed: {err}") from err

    @cached_property
    def _line_starts(self) -> list[int]:
        first = len(_BOM) if self.data.startswith(_BOM) else 0
        return [first, *(m.end() for m in _LINE_END.finditer(self.data))]

    def function(self, name: str) -> Function | None:
        """The function or method of this dotted name, the last one where it is defined twice."""
        body: Sequence[ast.stmt] = self.tree.body
        *classes, last = name.split(".")
        for part in classes:
            found = [n for n in body if isinstance(n, ast.ClassDef) and n.name == part]
            if not found:
                return None
            body = found[-1].body
        functions = [n for n in body if isinstance(n, Function) and n.name == last]
        return functions[-1] if functions else None

    def span(self, first: ast.AST, last: ast.AST | None = None) -> Span:
        """Byte offsets from the start of `first` to the end of `last`."""
        start, end = _located(first), _located(last or first)
        assert end.end_lineno is not None and end.end_col_offset is not None
        return (
            self._line_starts[start.lineno - 1] + start.col_offset,
            self._line_starts[end.end_lineno - 1] + end.end_col_offset,
        )

    def text(self, node: ast.AST) -> str:
        """Source of an expression, on one line: where it spans several, as Python would print it."""
        start, end = self.span(node)
        text = self.data[start:end].decode("utf-8")
        return text if "\n" not in text and "\r" not in text else ast.unparse(node)

    def segment(self, node: ast.AST) -> str:
        """Source of a whole function, comments included."""
        start, end = self.span(node)
        return self.data[start:end].decode("utf-8")

    def line_start(self, offset: int) -> int:
        return max(s for s in self._line_starts if s <= offset)

    def indent_at(self, offset: int) -> bytes:
        """What stands before `offset` on its line. Raises NotEditable unless it is only white space."""
        indent = self.data[self.line_start(offset) : offset]
        if indent.strip(b" \t"):
            raise NotEditable("the statement to change shares its line with another one")
        return indent

    def newline_at(self, offset: int) -> bytes:
        """The line ending in use around `offset`."""
        match = _LINE_END.search(self.data, offset)
        return match[0] if match else b"\n"

    def spliced(self, splices: Sequence[Splice]) -> bytes:
        """The file with the splices made; they must not overlap."""
        data = self.data
        following = len(data)
        for splice in sorted(splices, key=lambda s: s.span, reverse=True):
            start, end = splice.span
            assert end <= following, "overlapping splices"
            data = data[:start] + splice.text + data[end:]
            following = start
        return data

    def innermost_statement(self, root: ast.AST, offset: int) -> ast.stmt:
        """The smallest statement below `root` that covers `offset`."""
        covering = [
            n for n in ast.walk(root) if isinstance(n, ast.stmt) and self.span(n)[0] <= offset < self.span(n)[1]
        ]
        return min(covering, key=lambda n: self.span(n)[1] - self.span(n)[0])


def _located(node: ast.AST) -> ast.stmt | ast.expr:
    assert isinstance(node, ast.stmt | ast.expr)
    return node
