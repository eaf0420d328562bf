"""Patches: small replacements in a file, as a unified diff."""

from __future__ import annotations

import ast

from gradguard.evidence.syntax import Source, range_of
from gradguard.fixes.diff import unified


def replaced(source: Source, changes: list[tuple[ast.AST, str]]) -> str | None:
    """The diff that puts new text in place of nodes; None where the result would not be Python or a node has no place.

    Nodes must not overlap.
    """
    lines = list(source.lines)
    placed = [(range_of(node), text) for node, text in changes]
    for place, text in sorted(placed, key=lambda item: item[0] or (0, 0, 0, 0), reverse=True):
        if place is None or not 0 < place[0] <= place[2] <= len(lines):
            return None
        first, start, last, end = place
        head = lines[first - 1][: source.characters(first, start)]
        tail = lines[last - 1][source.characters(last, end) :]
        lines[first - 1 : last] = (head + text + tail).splitlines(keepends=True)
    return unified(source, lines)


def inserted(source: Source, line: int, text: str) -> str | None:
    """The diff that puts a line of its own before `line` (1-based), indented as that one is."""
    if not 0 < line <= len(source.lines):
        return None
    old = source.lines[line - 1]
    indent = old[: len(old) - len(old.lstrip())]
    return unified(source, [*source.lines[: line - 1], f"{indent}{text}\n", *source.lines[line - 1 :]])


def removed(source: Source, first: int, last: int) -> str | None:
    """The diff that drops lines `first` to `last` (1-based)."""
    return unified(source, [*source.lines[: first - 1], *source.lines[last:]])
