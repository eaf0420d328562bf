"""The unified diff of a fix, made from a file's text and the text as it should be."""

from __future__ import annotations

import ast
import difflib
import os

from gradguard.analysis.program.syntax import Source, first_line
from gradguard.core.foreign_exceptions import internal_error


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
    if not _is_python(source, new):
        return None
    names = header_names(source.filename)
    return None if names is None else "".join(difflib.unified_diff(_ended(source.lines), _ended(new), *names, n=context)) or None


def header_names(filename: str) -> tuple[str, str] | None:
    """A file's names in the header of a diff; None where its name cannot stand there.

    Relative to the working directory, for `patch -p1`, where the file is below it, else absolute.
    """
    path = os.path.abspath(filename)
    if not path.isprintable():
        return None
    try:
        folder = os.path.join(os.getcwd(), "")
    except internal_error(OSError):  # it is gone
        return path, path
    if not path.startswith(folder):
        return path, path
    return heads(path[len(folder) :].replace(os.sep, "/"))


def heads(name: str) -> tuple[str, str]:
    """The names in the header of a diff: of a path below the working directory as `patch -p1` wants them, else as they are."""
    return (name, name) if name.startswith("/") or ":" in name[:3] else (f"a/{name}", f"b/{name}")


def _ended(lines: list[str]) -> list[str]:
    return [line if line.endswith("\n") else line + "\n" for line in lines]


def _is_python(source: Source, new: list[str]) -> bool:
    """Whether the new text can be parsed; only the function around the change is, where there is one: files have thousands of lines."""
    old = source.lines
    shared = min(len(old), len(new))
    above = next((i for i in range(shared) if old[i] != new[i]), shared)
    below = next((i for i in range(shared - above) if old[-1 - i] != new[-1 - i]), shared - above)
    around = [
        node
        for node in source.scopes
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and first_line(node) <= above + 1 <= (node.end_lineno or 0)
        and len(old) - below <= (node.end_lineno or 0)
    ]
    if around:
        inner = max(around, key=first_line)
        changed = new[first_line(inner) - 1 : len(new) - len(old) + (inner.end_lineno or 0)]
        tree = _parsed(["if True:\n", *changed] if inner.col_offset else changed)
        block = [] if tree is None else tree.body
        if inner.col_offset and len(block) == 1 and isinstance(block[0], ast.If):
            block = block[0].body
        if len(block) == 1 and isinstance(block[0], type(inner)):  # it is still one function, indented as before
            return True
    return _parsed(new) is not None


def _parsed(lines: list[str]) -> ast.Module | None:
    try:
        return ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return None
