"""The unified diff of a fix, made from a file's text and the text as it should be."""

from __future__ import annotations

import ast
import difflib
import os

from gradguard.analysis.program.syntax import Source


def unified(source: Source, new: list[str], context: int = 1) -> str | None:
    """The diff from the file to these lines.

    Args:
        source: the file as it runs.
        new: all of its lines as they should be, with their line ends.
        context: unchanged lines around a change.

    Returns:
        None where the file is none (a notebook cell, `exec`), the result would not be Python, or nothing changes.
    """
    if source.filename.startswith("<"):
        return None
    try:
        ast.parse("".join(new))
    except (SyntaxError, ValueError):
        return None
    name = os.path.basename(source.filename)
    return "".join(difflib.unified_diff(_ended(source.lines), _ended(new), f"a/{name}", f"b/{name}", n=context)) or None


def _ended(lines: list[str]) -> list[str]:
    return [line if line.endswith("\n") else line + "\n" for line in lines]
