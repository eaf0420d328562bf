"""Repairs that move, repeat, wrap or unwrap whole statements, as unified diffs.

Every function answers None where the result is not certain to be the same text: statements that share a line with others, and
strings over several lines, whose content an indentation would change.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from gradguard.analysis.program.syntax import Source, first_line
from gradguard.fixes.diff import unified
from gradguard.fixes.edits import indent_of


class Layout:
    """The lines of a file with statements taken out and put in elsewhere; line numbers stay those of the file as it runs."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._dropped: set[int] = set()
        self._after: dict[int, list[str]] = {}
        self._certain = True

    def text(self, statement: ast.stmt, indent: str) -> list[str]:
        """The statement's lines, at another indentation."""
        first, last = first_line(statement), statement.end_lineno or statement.lineno
        own = indent_of(self.source, first)
        lines = [_ended(line) for line in self.source.lines[first - 1 : last]]
        self._certain &= own == self.source.lines[first - 1][: statement.col_offset] if first == statement.lineno else True
        if own == indent:
            return lines
        self._certain &= not any(
            isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno != node.lineno for node in ast.walk(statement)
        )
        return [indent + line[len(own) :] if line.startswith(own) else line for line in lines]

    def drop(self, statement: ast.stmt) -> None:
        """Takes a statement out."""
        self.drop_lines(first_line(statement), statement.end_lineno or statement.lineno)

    def drop_lines(self, first: int, last: int) -> None:
        """Takes lines out."""
        self._dropped.update(range(first, last + 1))

    def put(self, after: int, lines: Sequence[str]) -> None:
        """Puts lines after the line with this number (0: at the top)."""
        self._after.setdefault(after, []).extend(lines)

    def reindent(self, statement: ast.stmt, indent: str) -> None:
        """Gives a statement another indentation, in its place."""
        lines = self.text(statement, indent)
        self.drop(statement)
        self.put(statement.end_lineno or statement.lineno, lines)

    def diff(self) -> str | None:
        """The change as a unified diff."""
        if not self._certain:
            return None
        lines = list(self._after.get(0, []))
        for number, line in enumerate(self.source.lines, 1):
            if number not in self._dropped:
                lines.append(_ended(line))
            lines += self._after.get(number, [])
        return unified(self.source, lines)


def moved_after(source: Source, statements: Sequence[ast.stmt], anchor: ast.stmt, keep: bool = False) -> str | None:
    """The diff that moves statements to right after another one; `keep` repeats them there instead."""
    return _placed(source, statements, anchor.end_lineno or anchor.lineno, indent_of(source, first_line(anchor)), keep)


def moved_before(source: Source, statements: Sequence[ast.stmt], anchor: ast.stmt) -> str | None:
    """The diff that moves statements to right before another one."""
    return _placed(source, statements, first_line(anchor) - 1, indent_of(source, first_line(anchor)), False)


def _placed(source: Source, statements: Sequence[ast.stmt], after: int, indent: str, keep: bool) -> str | None:
    layout = Layout(source)
    for statement in sorted(statements, key=first_line):
        lines = layout.text(statement, indent)
        if not keep:
            layout.drop(statement)
        layout.put(after, lines)
    return layout.diff() if statements else None


def unwrapped(source: Source, block: ast.With | ast.AsyncWith | ast.If) -> str | None:
    """The diff that takes a block's header away and keeps its body."""
    if isinstance(block, ast.If) and block.orelse:
        return None
    layout = Layout(source)
    layout.drop_lines(first_line(block), first_line(block.body[0]) - 1)
    for statement in block.body:
        layout.reindent(statement, indent_of(source, first_line(block)))
    return layout.diff()


def wrapped(source: Source, statements: Sequence[ast.stmt], header: str, imports: str | None = None) -> str | None:
    """The diff that puts neighbouring statements under a header such as `with torch.enable_grad():`.

    Args:
        imports: an import statement that the header needs, put after the file's last one at the top.
    """
    layout = Layout(source)
    indent = indent_of(source, first_line(statements[0]))
    layout.put(first_line(statements[0]) - 1, [f"{indent}{header}\n"])
    for statement in statements:
        layout.reindent(statement, indent + "    ")
    if imports is not None and source.tree is not None:
        known = [item for item in source.tree.body if isinstance(item, (ast.Import, ast.ImportFrom))]
        layout.put(known[-1].end_lineno or known[-1].lineno if known else 0, [imports + "\n"])
    return layout.diff()


def swapped(source: Source, outer: ast.With, inner: ast.For | ast.While) -> str | None:
    """The diff that opens a `with` in each iteration of the loop that it now stands around."""
    if outer.body != [inner] or inner.orelse or inner.body[0].lineno == inner.lineno:
        return None
    own, within = indent_of(source, outer.lineno), indent_of(source, inner.lineno)
    head = source.lines[outer.lineno - 1 : inner.lineno - 1]
    loop = source.lines[inner.lineno - 1 : first_line(inner.body[0]) - 1]
    layout = Layout(source)
    layout.drop_lines(outer.lineno, first_line(inner.body[0]) - 1)
    layout.put(outer.lineno - 1, [own + _ended(line)[len(within) :] for line in loop])
    layout.put(outer.lineno - 1, [within + _ended(line)[len(own) :] for line in head])
    return layout.diff()


def siblings(source: Source, statement: ast.stmt) -> list[ast.stmt]:
    """The statements of the block that a statement stands in, itself among them."""
    above = source.parents.get(statement)
    for _, body in ast.iter_fields(above) if above is not None else ():
        if isinstance(body, list) and statement in body:
            return body
    return []


def _ended(line: str) -> str:
    return line if line.endswith("\n") else line + "\n"
