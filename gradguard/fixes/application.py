"""Puts a unified diff into texts, exactly: a line that is not as the diff has it is an error, and every line keeps its own end."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_ENDS = re.compile(r"([^\r\n]*)(\r\n|\r|\n|\Z)")


class PatchError(ValueError):
    """A patch that cannot be read, or does not fit the text it is for."""


class Change(NamedTuple):
    """Lines in place of lines: `start` is the index of the first old one, or of the line that the new ones are put before."""

    start: int
    old: tuple[str, ...]
    new: tuple[str, ...]

    def overlaps(self, other: Change) -> bool:
        """Whether both cannot be made: they touch the same lines, or put different ones at the same place."""
        first, second = sorted((self, other))
        return first != second and (second.start < first.start + len(first.old) or first.start == second.start)


class Text(NamedTuple):
    """A file's text: its lines, each with the line end that it has, and how they are written as bytes."""

    lines: tuple[tuple[str, str], ...]
    encoding: str

    @classmethod
    def read(cls, content: bytes) -> Text:
        """The text of a Python file.

        Raises:
            PatchError: it is not text in the encoding that it declares.
        """
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            text = content.decode(encoding)
        except (SyntaxError, UnicodeDecodeError, LookupError) as error:
            raise PatchError(f"not readable as text: {error}") from None
        lines = tuple((found[1], found[2]) for found in _ENDS.finditer(text) if found[0])
        return cls(lines, encoding)

    @property
    def content(self) -> bytes:
        """The bytes of the file."""
        return "".join(line + end for line, end in self.lines).encode(self.encoding)

    @property
    def plain(self) -> list[str]:
        """The lines as Python reads them, each with a newline."""
        return [line + "\n" for line, _ in self.lines]

    def changed(self, changes: Iterable[Change]) -> Text:
        """The text with changes made.

        Raises:
            PatchError: a line that is to be replaced is not there.
        """
        lines, usual = list(self.lines), self.lines[0][1] if self.lines and self.lines[0][1] else "\n"
        for change in sorted(changes, reverse=True):  # from the end upwards, so that indices above stay true
            stop = change.start + len(change.old)
            old = lines[change.start : stop]
            if tuple(line for line, _ in old) != change.old:
                raise PatchError(f"line {change.start + 1} is not as the patch has it")
            at_end = stop >= len(lines)
            ends = [end or usual for _, end in old] or [usual]
            new = [(line, ends[min(i, len(ends) - 1)]) for i, line in enumerate(change.new)]
            if at_end and lines and not lines[-1][1]:  # the file ends without a newline, and goes on doing so
                if not old:
                    lines[-1] = (lines[-1][0], usual)
                if new:
                    new[-1] = (new[-1][0], "")
            lines[change.start : stop] = new
        return Text(tuple(lines), self.encoding)

    def is_python(self) -> bool:
        """Whether Python can parse it."""
        try:
            ast.parse("".join(self.plain))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return True


def changes_of(patch: str) -> dict[str, list[Change]]:
    """What a unified diff changes, by the file's name in its header without `b/`; unchanged lines around are left out.

    Raises:
        PatchError: it is no unified diff, makes or removes files, or changes nothing.
    """
    found: dict[str, list[Change]] = {}
    lines = patch.split("\n")
    name: str | None = None
    i = 0
    while i < len(lines):
        line = lines[i]
        hunk = _HUNK.match(line)
        if line.startswith("--- ") and i + 1 < len(lines) and lines[i + 1].startswith("+++ "):
            old, new = (_named(lines[j][4:]) for j in (i, i + 1))
            if old != new:
                raise PatchError(f"the patch makes, removes or renames a file: {old} to {new}")
            name, i = new, i + 2
        elif hunk:
            if name is None:
                raise PatchError("the patch does not say which file it is for")
            i = _read_hunk(lines, i, hunk, found.setdefault(name, []))
        elif line.strip() and not line.startswith("\\"):
            raise PatchError(f"no line of a unified diff: {line[:60]!r}")
        else:
            i += 1
    if not any(found.values()):
        raise PatchError("the patch changes nothing")
    return found


def _named(text: str) -> str:
    name = text.split("\t")[0].rstrip()
    return name[2:] if name.startswith(("a/", "b/")) else name


def _read_hunk(lines: list[str], i: int, hunk: re.Match[str], changes: list[Change]) -> int:
    """Reads the hunk whose header stands at `i`; gives the index of the line after it."""
    old_left, new_left = (int(hunk[group]) if hunk[group] is not None else 1 for group in (2, 3))
    at = int(hunk[1]) - (1 if old_left else 0)  # a hunk without old lines names the line it comes after
    old: list[str] = []
    new: list[str] = []
    i += 1

    def close() -> None:
        if old or new:
            changes.append(Change(at - len(old), tuple(old), tuple(new)))
            old.clear()
            new.clear()

    while old_left or new_left:
        line = lines[i] if i < len(lines) else None
        sign, text = ("", "") if line is None else (line[:1] or " ", line[1:])
        if sign == "-" and old_left:
            old.append(text)
            at, old_left = at + 1, old_left - 1
        elif sign == "+" and new_left:
            new.append(text)
            new_left -= 1
        elif sign == " " and old_left and new_left:
            close()
            at, old_left, new_left = at + 1, old_left - 1, new_left - 1
        elif sign != "\\":
            raise PatchError("a hunk of the patch is shorter or longer than it says")
        i += 1
    close()
    return i


def applied(texts: Mapping[str, Text], patch: str, paths: Mapping[str, str]) -> dict[str, Text]:
    """Texts with a patch in them.

    Args:
        texts: by path.
        patch: a unified diff.
        paths: the path of each name in its headers.

    Raises:
        PatchError: it does not fit, is for another file, or what comes out is not Python.
    """
    result = dict(texts)
    for name, changes in changes_of(patch).items():
        path = paths.get(name)
        if path is None or path not in result:
            raise PatchError(f"the patch is for {name}, which is not among its files")
        result[path] = result[path].changed(changes)
        if not result[path].is_python():
            raise PatchError(f"{name} would not be Python any more")
    return result
