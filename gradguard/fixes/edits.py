"""Patches: small changes of a file, as a unified diff; None wherever the result would not be Python or a place is not known."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from gradguard.analysis.program.syntax import Range, Source, load, range_of
from gradguard.core.diagnosis import SourceSpan
from gradguard.fixes.diff import unified

Edit = tuple[Range, str]  # a range of the tree (columns in bytes, as `ast` counts them) and its new text


def patched(source: Source, changes: Sequence[Edit] = (), insert: Sequence[tuple[int, str]] = ()) -> str | None:
    """The diff that writes new text into ranges and new lines between lines.

    Args:
        changes: must not overlap.
        insert: new lines, each with the number of the line that it is put after.
    """
    lines = [line if line.endswith("\n") else line + "\n" for line in source.lines]
    below = sorted(((after, text + "\n") for after, text in insert), key=lambda item: item[0])[::-1]  # of one line, the last first
    for (first, start, last, end), text in sorted(changes, reverse=True):
        if not 0 < first <= last <= len(lines):
            return None
        while below and below[0][0] >= last:  # from the end upwards, so that line numbers above stay true
            lines.insert(*below.pop(0))
        head = lines[first - 1][: source.characters(first, start)]
        tail = lines[last - 1][source.characters(last, end) :]
        lines[first - 1 : last] = (head + text + tail).splitlines(keepends=True)
    for after, text in below:
        lines.insert(after, text)
    return unified(source, lines)


def replaced(source: Source, changes: Sequence[tuple[ast.AST, str]]) -> str | None:
    """The diff that puts new text in place of nodes, which must not overlap."""
    edits = [edit for node, text in changes for edit in edit_of(node, text)]
    return patched(source, edits) if len(edits) == len(changes) else None


def with_argument(source: Source, call: ast.Call, argument: str) -> str | None:
    """The diff that adds a keyword argument after those of a call; None where it has none."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    last = max(given, key=lambda value: (value.lineno, value.col_offset), default=None)
    text = None if last is None else source.segment(last)
    return None if last is None or text is None else replaced(source, [(last, f"{text}, {argument}")])


def respelt(span: SourceSpan | None, old: str, new: str) -> str | None:
    """The diff that replaces the one occurrence of `old` in the text of a span."""
    source = None if span is None else load(span.file)
    if span is None or source is None or span.text is None or span.text.count(old) != 1:
        return None
    before = span.text[: span.text.index(old)]
    line = span.line + before.count("\n")
    start = len(before) - before.rfind("\n") - 1 + (0 if "\n" in before else span.column or 0)
    head = source.lines[line - 1]
    if "\n" in old or head[start : start + len(old)] != old:
        return None
    return unified(source, [*source.lines[: line - 1], head[:start] + new + head[start + len(old) :], *source.lines[line:]])


def edit_of(node: ast.AST, text: str) -> list[Edit]:
    """The node's text changed; empty where its place is not known."""
    place = range_of(node)
    return [] if place is None else [(place, text)]


def appended(node: ast.AST, text: str) -> list[Edit]:
    """Text put right after a node: `.clone()` of an expression; empty where its place is not known."""
    return [((last, end, last, end), text) for *_, last, end in filter(None, [range_of(node)])]


def after(source: Source, statement: ast.stmt, text: str) -> tuple[int, str]:
    """A new line after a statement, at its indentation, for `patched(insert=...)`."""
    return (statement.end_lineno or statement.lineno, indent_of(source, statement.lineno) + text)


def before(source: Source, statement: ast.stmt, text: str) -> tuple[int, str]:
    """A new line before a statement, at its indentation, for `patched(insert=...)`."""
    return (statement.lineno - 1, indent_of(source, statement.lineno) + text)


def indent_of(source: Source, line: int) -> str:
    """The white space a line (1-based) begins with."""
    text = source.lines[line - 1]
    return text[: len(text) - len(text.lstrip())]


def inserted(source: Source, line: int, text: str) -> str | None:
    """The diff that puts a line of its own before `line` (1-based), indented as that one is."""
    if not 0 < line <= len(source.lines):
        return None
    return patched(source, insert=[(line - 1, indent_of(source, line) + text)])


def removed(source: Source, first: int, last: int) -> str | None:
    """The diff that drops lines `first` to `last` (1-based)."""
    return unified(source, [*source.lines[: first - 1], *source.lines[last:]])
