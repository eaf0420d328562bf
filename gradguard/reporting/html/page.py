"""The diagnosis as HTML: a page of its own for a report, or a fragment for a notebook.

Everything is inline: no script, no font, no request. Needs jinja2 (the `report` extra), imported when the first page is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from gradguard.core.diagnosis import Diagnosis
from gradguard.reporting import wording
from gradguard.reporting.html.charts import norms_picture, timeline_picture
from gradguard.reporting.html.graph_picture import graph_picture, place_of
from gradguard.reporting.html.template import TEMPLATE
from gradguard.reporting.patch_lines import read_patch
from gradguard.reporting.source_blocks import Block, Mark, build_blocks
from gradguard.reporting.terminal.layout import clean, one_line

if TYPE_CHECKING:
    from jinja2 import Template


MARK = "<!-- gradguard report -->"  # stands at the beginning of every page


@dataclass(frozen=True)
class Piece:
    """A stretch of a source line; `style` is `culprit`, `related` or empty."""

    text: str
    style: str


@dataclass(frozen=True)
class HtmlLine:
    """A shown source line (number None: lines left out) with the labels that stand below it."""

    number: int | None
    pieces: list[Piece]
    labels: list[Piece]


@lru_cache(maxsize=1)
def _template() -> Template:
    from jinja2 import Environment
    from markupsafe import Markup

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(
        wording=wording,
        one_line=one_line,
        clean=clean,
        read_patch=read_patch,
        html_lines=html_lines,
        build_blocks=build_blocks,
        newline="\n",
        paragraphs=paragraphs,
        ticks=ticks,
        graph_picture=lambda part: Markup(graph_picture(part)),
        norms_picture=lambda layers: Markup(norms_picture(layers)),
        timeline_picture=lambda events: Markup(timeline_picture(events)),
        place_of=place_of,
    )
    return environment.from_string(TEMPLATE)


def html_lines(block: Block) -> list[HtmlLine]:
    """The lines of a block with what is marked on each."""
    lines = []
    rows = block.rows()
    indent = min((len(text) - len(text.lstrip()) for row in rows if row for text in [row[1]] if text.strip()), default=0)
    for row in rows:
        if row is None:
            lines.append(HtmlLine(None, [Piece("…", "")], []))
            continue
        number, text = row
        labels = [Piece(mark.label, _style(mark)) for mark in block.marks if mark.end_line == number and mark.label]
        lines.append(HtmlLine(number, _pieces(number, text, block.marks, indent), labels))
    if not rows:
        labels = [Piece(f"{mark.label or 'here'} (source not at hand)", _style(mark)) for mark in block.marks]
        lines.append(HtmlLine(None, [], labels))
    return lines


def _pieces(number: int, text: str, marks: list[Mark], indent: int) -> list[Piece]:
    """The line cut where marks begin and end; where two overlap, the culprit's shows."""
    styles = [""] * len(text)
    for mark in sorted(marks, key=lambda mark: mark.culprit):
        if mark.line <= number <= mark.end_line:
            start = mark.column if number == mark.line else len(text) - len(text.lstrip())
            end = mark.end_column if number == mark.end_line else len(text.rstrip())
            styles[start:end] = [_style(mark)] * len(styles[start:end])
    pieces: list[Piece] = []
    for character, style in list(zip(text, styles, strict=True))[indent:]:
        if pieces and pieces[-1].style == style:
            pieces[-1] = Piece(pieces[-1].text + character, style)
        else:
            pieces.append(Piece(character, style))
    return pieces


def _style(mark: Mark) -> str:
    return "culprit" if mark.culprit else "related"


def paragraphs(text: str) -> list[tuple[str, bool]]:
    """Text as (paragraph, is it code): lines that are indented are code, as in the terminal."""
    parts: list[tuple[str, bool]] = []
    fresh = True
    for line in clean(text).split("\n"):
        if not line.strip():
            fresh = True
            continue
        code = line[0].isspace()
        if not fresh and parts and parts[-1][1] == code:
            parts[-1] = (f"{parts[-1][0]}\n{line}" if code else f"{parts[-1][0]} {line}", code)
        else:
            parts.append((line, code))
        fresh = False
    return parts


def ticks(text: str) -> list[tuple[str, bool]]:
    """Text as (piece, is it code): what stands between backticks is code."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:  # a stray backtick
        return [(text, False)]
    return [(piece, bool(index % 2)) for index, piece in enumerate(pieces) if piece]


def render_html(diagnoses: Sequence[Diagnosis], title: str = "gradguard") -> str:
    """A self-contained page with all diagnoses, light or dark as the browser prefers.

    Raises:
        ImportError: jinja2 is not installed (`pip install gradguard[report]`).
    """
    return assemble(diagnoses, [render_section(each, i) for i, each in enumerate(diagnoses, 1)], title)


def render_section(diagnosis: Diagnosis, number: int | str) -> str:
    """One diagnosis, the so-manieth of its page, for `assemble`.

    Raises:
        ImportError: jinja2 is not installed (`pip install gradguard[report]`).
    """
    return _loaded().module.show(diagnosis, number)  # type: ignore[attr-defined, no-any-return]


def assemble(diagnoses: Sequence[Diagnosis], sections: Sequence[str], title: str, left_out: int = 0) -> str:
    """A page of sections that are rendered already.

    Args:
        left_out: how many more diagnoses there were.
    """
    return _loaded().render(diagnoses=diagnoses, sections=sections, title=title, page=True, left_out=left_out, mark=MARK).lstrip("\n")


def render_fragment(diagnosis: Diagnosis) -> str:
    """One diagnosis as a `<div>` with its own style, for a page of somebody else's.

    Raises:
        ImportError: jinja2 is not installed (`pip install gradguard[report]`).
    """
    return _loaded().render(sections=[render_section(diagnosis, "fragment")], page=False).lstrip("\n")


def _loaded() -> Template:
    try:
        return _template()
    except ImportError as error:
        raise ImportError("the HTML report needs jinja2: pip install gradguard[report]") from error
