"""Rows of styled text: wrapping by terminal cells, and colour.

A row is a list of segments, a segment a piece of text with the name of a style. Nothing here knows what a diagnosis is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple
from unicodedata import category, east_asian_width

TAB = 4


class Segment(NamedTuple):
    """A piece of text and the name of its style (a key of `SGR`, or empty)."""

    text: str
    style: str = ""


Row = list[Segment]

# Select Graphic Rendition parameters. Only the sixteen basic colours: they follow the theme of the user's terminal.
SGR = {
    "error": "1;31",
    "warning": "1;33",
    "info": "1;36",
    "strong": "1",
    "gutter": "34",
    "culprit": "1;31",
    "related": "36",
    "path": "1",
    "label": "1;36",
    "fix": "1;32",
    "added": "32",
    "removed": "31",
    "dim": "2",
}


class Glyphs(NamedTuple):
    """The characters a snippet is drawn with."""

    bar: str
    dots: str
    under: str
    corner: str
    open: str
    fill: str
    arrow: str


ASCII = Glyphs(bar="|", dots="...", under="-", corner="|", open="/", fill="_", arrow="->")
UNICODE = Glyphs(bar="│", dots="…", under="─", corner="╰", open="╭", fill="─", arrow="→")

# A word, or words held together by backticks: an expression such as `a + b` is not taken apart. What is longer than the
# bound is prose with a stray backtick.
_WORD = re.compile(r"(?:[^\s`]|`[^`\n]{1,60}`|`)+")
# What moves the cursor, changes colours, reorders the line, or takes part in it unseen (Unicode's Default_Ignorable_Code_Point, without
# the variation selectors, which only choose between forms of the character before them), and half pairs, which cannot be encoded.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff"
    "\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e00ff\U000e01f0-\U000e0fff\ud800-\udfff]"
)
_ESCAPE = re.compile("\x1b\\[[0-9;?]*[ -/]*[@-~]")


def cells(text: str) -> int:
    """Width of `text` in terminal cells (a CJK character or an emoji takes two)."""
    if text.isascii():
        return len(text)
    return sum(0 if category(char) in ("Mn", "Me") else 1 + (east_asian_width(char) in "WF") for char in text)


def clean(text: str) -> str:
    """Text without terminal escapes and control characters; newlines and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROL.sub("?", _ESCAPE.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))


def visible(text: str) -> str:
    """A source line with every control character replaced by one character, so that columns stay true."""
    return text if text.isascii() and text.isprintable() else _CONTROL.sub("?", text)


def one_line(text: str) -> str:
    """The text with every run of white space made one blank."""
    return " ".join(clean(text).split())


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` cells, broken at white space only; a longer word stands alone and sticks out.

    Paragraphs (separated by a blank line) are kept apart; a line that is indented is code and is kept as it is.
    """
    lines: list[str] = []
    words: list[str] = []
    for line in clean(text).strip("\n").split("\n"):
        if line.strip() and not line[0].isspace():
            words.extend(_words(line, width))
            continue
        lines.extend(_fill(words, width))
        words = []
        if line.strip() or (lines and lines[-1]):
            lines.append(line.expandtabs(TAB).rstrip())
    lines.extend(_fill(words, width))
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _words(line: str, width: int) -> Iterable[str]:
    for match in _WORD.finditer(line):
        word = match.group()
        if cells(word) > width:
            yield from word.split()
        else:
            yield word


def _fill(words: list[str], width: int) -> list[str]:
    lines: list[str] = []
    used = 0
    for word in words:
        size = cells(word)
        if lines and used + 1 + size <= width:
            lines[-1] += " " + word
            used += 1 + size
        else:
            lines.append(word)
            used = size
    return lines


def paint(row: Row, color: bool) -> str:
    """The row as text, with colour codes if asked for, without trailing blanks."""
    segments = list(row)
    while segments and not segments[-1].text.rstrip():
        segments.pop()
    if segments:
        segments[-1] = Segment(segments[-1].text.rstrip(), segments[-1].style)
    if not color:
        return "".join(segment.text for segment in segments)
    return "".join(f"\x1b[{SGR[style]}m{text}\x1b[0m" if style and text.strip() else text for text, style in segments)
