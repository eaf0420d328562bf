"""Small changes to the user's source, as unified diffs: only where a change is mechanical and certain to parse."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from gradguard.evidence.syntax import Range, Source, range_of
from gradguard.fixes.diff import unified


def patch(source: Source, changes: Sequence[tuple[Range, str]] = (), insert: Sequence[tuple[int, str]] = ()) -> str | None:
    """A unified diff; None where the result would not parse.

    Args:
        changes: ranges of the tree (columns in bytes) with their new text.
        insert: new lines, each with the line number that it is put after.
    """
    lines = [line if line.endswith("\n") else line + "\n" for line in source.lines]
    new: list[str] = list(lines)
    for (first, start, last, end), text in sorted(changes, reverse=True):
        if not 0 < first <= last <= len(new):
            return None
        head = new[first - 1].encode()[:start].decode()
        tail = new[last - 1].encode()[end:].decode()
        new[first - 1 : last] = [head + text + tail]
        if first != last and insert:
            return None  # line numbers have moved
    for after, text in sorted(insert, reverse=True):
        new.insert(after, text + "\n")
    return unified(source, new)


def indent_of(source: Source, statement: ast.stmt) -> str:
    """The white space a statement's line begins with."""
    line = source.lines[statement.lineno - 1]
    return line[: len(line) - len(line.lstrip())]


def after(source: Source, statement: ast.stmt, text: str) -> tuple[int, str]:
    """A new line after a statement, at its indentation."""
    return (statement.end_lineno or statement.lineno, indent_of(source, statement) + text)


def replaced(node: ast.AST, text: str) -> list[tuple[Range, str]]:
    """The node's text changed; empty where its place is not known."""
    place = range_of(node)
    return [] if place is None else [(place, text)]
