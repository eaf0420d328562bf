"""A unified diff as numbered lines, short enough to read in an error message."""

from __future__ import annotations

import re
from typing import NamedTuple

from gradguard.reporting.terminal.layout import clean

_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")
_FILE = re.compile(r"\+\+\+ (?:b/)?([^\t\n]+)")


class PatchLine(NamedTuple):
    """One line of a change. `sign` is "-", "+", " ", or "" for lines left out; `number` that of the file as it is, None for what is new."""

    sign: str
    number: int | None
    text: str


class Patch(NamedTuple):
    """The change to one file."""

    file: str
    lines: list[PatchLine]


def read_patch(text: str, context: int = 1) -> list[Patch]:
    """The changes of a unified diff, with at most `context` unchanged lines around each; empty when it is no unified diff."""
    patches: list[Patch] = []
    old = 0
    inside = False
    for line in clean(text).split("\n"):
        if hunk := _HUNK.match(line):
            if not patches:
                patches.append(Patch("", []))
            if patches[-1].lines:
                patches[-1].lines.append(PatchLine("", None, ""))
            old, inside = int(hunk[1]), True
        elif line.startswith("--- ") and not (inside and _removes_dashes(line, text)):
            inside = False
        elif not inside and (name := _FILE.match(line)):
            patches.append(Patch(name[1].strip(), []))
        elif inside and line.startswith("-"):
            patches[-1].lines.append(PatchLine("-", old, line[1:]))
            old += 1
        elif inside and line.startswith("+"):
            patches[-1].lines.append(PatchLine("+", None, line[1:]))
        elif inside and not line.startswith("\\"):
            patches[-1].lines.append(PatchLine(" ", old, line[1:]))
            old += 1
    changed = [patch for patch in patches if any(line.sign in ("+", "-") for line in patch.lines)]
    return [Patch(patch.file, _trim(patch.lines, context)) for patch in changed]


def _removes_dashes(line: str, text: str) -> bool:
    """A removed source line that begins with "-- " looks like a file header; a header is followed by "+++ "."""
    after = text.split(line + "\n", 1)
    return len(after) == 2 and not after[1].startswith("+++ ")


def _trim(lines: list[PatchLine], context: int) -> list[PatchLine]:
    changed = [i for i, line in enumerate(lines) if line.sign in ("+", "-")]
    kept: list[PatchLine] = []
    last = -1
    for i, line in enumerate(lines):
        if line.sign and any(abs(i - j) <= context for j in changed):
            if kept and i != last + 1:
                kept.append(PatchLine("", None, ""))
            kept.append(line)
            last = i
    # Blank lines at the edges show nothing.
    while kept and kept[0].sign == " " and not kept[0].text.strip():
        kept.pop(0)
    while kept and kept[-1].sign == " " and not kept[-1].text.strip():
        kept.pop()
    return kept
