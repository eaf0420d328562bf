"""Places of this family's stories: from syntax nodes to sites, and what a call is called."""

from __future__ import annotations

import ast

from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.syntax import Source, range_of


def site_at(source: Source, node: ast.AST) -> ResolvedSite:
    """A node of a parsed file as a resolved site."""
    statement = source.statement(node)
    first, start, last, end = range_of(node) or (getattr(node, "lineno", 1), 0, getattr(node, "end_lineno", 1) or 1, 0)
    return ResolvedSite(
        file=source.filename, line=first, end_line=last, column=source.characters(first, start), end_column=source.characters(last, end),
        function=source.qualname_around(node), node=node, statement=statement, text=source.text((first, start, last, end)), source=source,
    )  # fmt: skip


def short(text: str | None, most: int = 60) -> str:
    """One line, cut in the middle when it is long."""
    flat = " ".join((text or "").split())
    return flat if len(flat) <= most else flat[: most - 12] + " ... " + flat[-7:]


def quoted(text: str | None) -> str:
    return f"`{short(text)}`"


UNNAMED = "the loss"  # a root without a name: what a framework calls backward on


def in_words(root: str, first: bool = False) -> str:
    """A root as code, or in words, which may be a sentence's first."""
    return (root.capitalize() if first else root) if root == UNNAMED else f"`{root}`"


def bare(root: str) -> str:
    """A root within code."""
    return "loss" if root == UNNAMED else root


def function_word(place: ResolvedSite | None) -> str:
    """` in `name`` where the place is inside a function."""
    if place is None or place.function == "<module>":
        return ""
    return f" in `{place.function}`"


def same_place(a: ResolvedSite | None, b: ResolvedSite | None) -> bool:
    return a is not None and b is not None and (a.file, a.line, a.column, a.end_line) == (b.file, b.line, b.column, b.end_line)
