"""The diagnosis as text: what a `GradGuardError` says, what a warning says, what `gradguard run` prints.

From top to bottom, in the order a tired reader needs it: the headline, the culprit's line, the other places of the story, why, what
to do, what not to do, then the facts, and PyTorch's own words. The exception's text has them verbatim (code that searches it for them
goes on working); what is printed for a person has their first sentence.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import TextIO

from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.core.foreign_exceptions import internal_error
from gradguard.reporting import wording
from gradguard.reporting.patch_lines import Patch, read_patch
from gradguard.reporting.source_blocks import Block, build_blocks, shown_path
from gradguard.reporting.terminal.layout import ASCII, UNICODE, Glyphs, Row, Segment, cells, clean, one_line, paint, wrap
from gradguard.reporting.terminal.snippet import number_width, snippet
from gradguard.reporting.wording import headline

__all__ = ["headline", "print_diagnosis", "render", "render_for_error"]

MIN_WIDTH, DEFAULT_WIDTH, MAX_WIDTH = 60, 100, 120
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z(])")
COLUMN = 10  # where the text of "why:", "fix:" and the like begins

# What is shown of long lists unless verbose; the rest is counted.
PLACES, NOTES, TENSORS, FIXES, AVOID, CRUMBS, PATCH_LINES, TORCH_LINES = 5, 5, 6, 3, 3, 3, 12, 16


def render(
    diagnosis: Diagnosis,
    *,
    width: int = DEFAULT_WIDTH,
    color: bool = False,
    verbose: bool = False,
    unicode: bool | None = None,
    brief: bool = False,
) -> str:
    """The diagnosis as text without a final newline.

    Args:
        width: in terminal cells; source lines are cut to it and prose is wrapped to it, at white space only. The headline,
            patches, PyTorch's words and words longer than the width stick out rather than being broken.
        color: with ANSI colour codes.
        verbose: nothing is cut.
        unicode: draw with box characters; None: where the encoding of stderr is a Unicode one.
        brief: of PyTorch's words, the first sentence.
    """
    if unicode is None:
        unicode = _is_unicode(sys.stderr)
    writer = _Writer(diagnosis, max(width, 40), verbose, UNICODE if unicode else ASCII)
    writer.write_all(brief and not verbose)
    return "\n".join(paint(row, color) for row in writer.rows)


def render_fixes(diagnosis: Diagnosis, *, width: int = DEFAULT_WIDTH, color: bool = False, unicode: bool | None = None) -> str:
    """The first line and the fixes alone: of a diagnosis that was shown before its fixes were tried."""
    writer = _Writer(diagnosis, max(width, 40), False, UNICODE if (_is_unicode(sys.stderr) if unicode is None else unicode) else ASCII)
    writer.write_fixes()
    return "\n".join(paint(row, color) for row in writer.rows)


def render_verified(before: Diagnosis, after: Diagnosis, *, width: int = DEFAULT_WIDTH, unicode: bool | None = None) -> str:
    """What trials have found out about a diagnosis that was shown before: its fixes, and the whole where another line is the culprit."""
    show = render_fixes if (before.culprit, before.confidence) == (after.culprit, after.confidence) else render
    return show(after, width=width, unicode=unicode)


class _Writer:
    def __init__(self, diagnosis: Diagnosis, width: int, verbose: bool, glyphs: Glyphs) -> None:
        self.diagnosis, self.width, self.verbose, self.glyphs = diagnosis, width, verbose, glyphs
        self.rows: list[Row] = []

    def write_fixes(self) -> None:
        self._title()
        self._fixes()

    def write_all(self, brief: bool) -> None:
        self._title()
        self._places()
        self._why()
        self._fixes()
        self._facts()
        self._torch(brief)

    def _limit(self, limit: int) -> int | None:
        return None if self.verbose else limit

    def _blank(self) -> None:
        if self.rows and self.rows[-1]:
            self.rows.append([])

    def _title(self) -> None:
        diagnosis = self.diagnosis
        head = f"{diagnosis.severity}[{diagnosis.code}]"
        self.rows.append([Segment(head, diagnosis.severity), Segment(wording.title(diagnosis)[len(head) :], "strong")])

    def _places(self) -> None:
        diagnosis = self.diagnosis
        blocks = build_blocks(diagnosis)
        self._blank()
        if diagnosis.culprit is None:
            self._field("where", wording.NO_CULPRIT + ("; what is known:" if blocks else ""))
            if blocks:
                self._blank()
        shown = blocks[: self._limit(PLACES)]
        digits = max(2, number_width(shown))
        for index, block in enumerate(shown):
            if index:
                self._blank()
            self.rows.append(self._header(block, digits))
            self.rows.extend(snippet(block, self.width, digits, self.glyphs))
        if rest := blocks[len(shown) :]:
            text = f"and {len(rest)} more: {', '.join(block.place for block in rest)}"
            self.rows.extend([Segment(" " * (digits + 2) + line, "dim")] for line in wrap(text, self.width - digits - 2))
        self._blank()

    def _header(self, block: Block, digits: int) -> Row:
        row = [Segment(" " * (digits + 2))]
        if block.culprit:
            row.append(Segment(wording.CULPRIT[self.diagnosis.confidence] + ": ", "culprit"))
        row.append(Segment(block.place, "path"))
        if block.function and block.function != "<module>":
            row.append(Segment(f" in {one_line(block.function)}"))
        return row

    def _field(self, label: str, text: str, style: str = "label", *, text_style: str = "") -> None:
        """`  label:  text`, wrapped, with the text in one column."""
        lines = wrap(text, max(30, self.width - COLUMN))
        for index, line in enumerate(lines):
            lead = f"  {label}:" if not index else ""
            self.rows.append([Segment(f"{lead:<{COLUMN - 1}} ", style), Segment(line, text_style)])

    def _list(self, label: str, items: Sequence[str], limit: int, style: str = "label") -> None:
        shown = items[: self._limit(limit)]
        for item in shown:
            self._field(label, item, style)
        if hidden := len(items) - len(shown):
            self._field(label, f"and {hidden} more", style, text_style="dim")

    def _why(self) -> None:
        diagnosis = self.diagnosis
        if diagnosis.explanation.strip():
            self._field("why", diagnosis.explanation)
        if diagnosis.confidence != "certain":
            self._field("sure", wording.CONFIDENCE[diagnosis.confidence])

    def _fixes(self) -> None:
        diagnosis = self.diagnosis
        fixes = diagnosis.fixes[: self._limit(FIXES)]
        if fixes:
            self._blank()
        for index, fix in enumerate(fixes):
            self._field("or" if index else "fix", f"{wording.fix_title(fix)} ({wording.standing(fix)})", "fix")
            if fix.detail:
                self._field_below(fix.detail)
            for further in fix.verified.behind:
                self._field_below(f"and behind it, {further}")
            if fix.patch and (not index or self.verbose):
                self._patch(fix)
        if hidden := len(diagnosis.fixes) - len(fixes):
            self._field("or", f"{hidden} more", "fix", text_style="dim")
        self._list("not", diagnosis.avoid, AVOID, "warning")

    def _field_below(self, text: str) -> None:
        self.rows.extend([Segment(" " * COLUMN + line)] for line in wrap(text, max(30, self.width - COLUMN)))

    def _patch(self, fix: Fix) -> None:
        text = fix.verified.patch or fix.patch or ""
        patches = read_patch(text)
        if not patches:
            self.rows.extend([Segment(" " * (COLUMN + 2) + line)] for line in clean(text).strip("\n").split("\n"))
            return
        room = self._limit(PATCH_LINES)
        for patch in patches:
            rows = self._patch_rows(patch, len(patches) > 1)
            cut = rows if room is None else rows[:room]
            self.rows.extend(cut)
            if len(cut) < len(rows):
                self.rows.append([Segment(" " * (COLUMN + 2) + f"and {len(rows) - len(cut)} more lines", "dim")])
                return
            room = None if room is None else room - len(cut)

    def _patch_rows(self, patch: Patch, several: bool) -> list[Row]:
        rows: list[Row] = []
        if patch.file and (several or not self._is_culprit_file(patch.file)):
            rows.append([Segment(" " * (COLUMN + 2) + shown_path(patch.file), "path")])
        texts = [line.text.expandtabs(4) for line in patch.lines]
        indent = min((len(text) - len(text.lstrip()) for text in texts if text.strip()), default=0)
        digits = max(len(str(line.number or "")) for line in patch.lines)
        for line, text in zip(patch.lines, texts, strict=True):
            if not line.sign:
                rows.append([Segment(" " * (COLUMN + 2) + self.glyphs.dots, "gutter")])
                continue
            style = {"+": "added", "-": "removed"}.get(line.sign, "")
            rows.append(
                [Segment(f"{'':{COLUMN + 2}}{line.number or '':>{digits}} ", "gutter"), Segment(f"{line.sign} {text[indent:]}", style)]
            )
        return rows

    def _is_culprit_file(self, file: str) -> bool:
        culprit = self.diagnosis.culprit
        return culprit is not None and os.path.abspath(culprit.file).endswith(os.sep + os.path.normpath(file).lstrip("./\\"))

    def _facts(self) -> None:
        diagnosis = self.diagnosis
        self._blank()
        self._list("note", diagnosis.notes, NOTES)
        self._tensors()
        if when := wording.when(diagnosis):
            self._field("when", when)
        crumbs = diagnosis.breadcrumbs if self.verbose else diagnosis.breadcrumbs[-CRUMBS:]
        for index, crumb in enumerate(crumbs):
            self._field_below(crumb) if index else self._field("before", crumb)
        if repeats := wording.repeats(diagnosis):
            self._field("again", repeats)
        self._field("more", wording.more(diagnosis))

    def _tensors(self) -> None:
        tensors = self.diagnosis.tensors
        if not tensors:
            return
        shown = wording.tensor_rows(tensors, self.glyphs.arrow)[: self._limit(TENSORS)]
        column = max((cells(name) for name, _ in shown if cells(name) <= 32), default=0)
        for index, (name, facts) in enumerate(shown):
            lead = "  tensor:" if not index else ""
            row = [Segment(f"{lead:<{COLUMN - 1}} ", "label"), Segment(name, "strong")]
            lines = wrap(facts, max(30, self.width - COLUMN - max(column, cells(name)) - 2))
            self.rows.append(row)
            if lines:
                row.append(Segment(" " * (max(0, column - cells(name)) + 2) + lines[0]))
            self.rows.extend([Segment(" " * (COLUMN + max(column, cells(name)) + 2) + line)] for line in lines[1:])
        if rest := tensors[len(shown) :]:
            names = ", ".join(name for name, _ in wording.tensor_rows(rest))
            self._field_below(f"and {len(rest)} more: {names}")

    def _torch(self, brief: bool) -> None:
        message = self.diagnosis.torch_message
        if not message or not message.strip():
            return
        self._blank()
        self.rows.append([Segment("  PyTorch said:", "dim")])
        whole = clean(message).strip("\n")
        text = _SENTENCE_END.split(whole, maxsplit=1)[0] if brief else whole
        lines = text.split("\n")
        shown = lines[: self._limit(TORCH_LINES)]
        self.rows.extend([Segment("    " + line, "dim")] for line in shown)
        if hidden := len(lines) - len(shown):
            self.rows.append([Segment(f"    and {hidden} more lines", "dim")])
        elif text != whole:
            self.rows.append([Segment("    (and more, in the exception's text and in the report)", "dim")])


def render_for_error(diagnosis: Diagnosis) -> str:
    """The text of the exception: as wide as the terminal, no colour, and drawn in ASCII, because it travels through logs."""
    return render(diagnosis, width=terminal_width(), unicode=False)


def print_diagnosis(diagnosis: Diagnosis, file: TextIO | None = None, *, color: bool | None = None, verbose: bool = False) -> None:
    """Print the diagnosis, to stderr unless told otherwise, in what the stream can show.

    Args:
        file: the stream; None: stderr as it is now.
        color: None: decided by `NO_COLOR`, `FORCE_COLOR`, `TERM` and whether the stream is a terminal.
        verbose: nothing is cut.
    """
    stream = sys.stderr if file is None else file
    if stream is None:  # pythonw and some services have no stderr
        return
    text = render(
        diagnosis,
        width=terminal_width(stream),
        color=wants_color(stream) if color is None else color,
        verbose=verbose,
        unicode=_is_unicode(stream),
        brief=True,
    )
    encoding = getattr(stream, "encoding", None)
    if encoding:  # a name or a source line in characters that this stream does not have must not raise a second error
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    stream.write(text + "\n")
    stream.flush()


def wants_color(stream: TextIO) -> bool:
    """Whether to colour what goes to `stream`: NO_COLOR, then FORCE_COLOR, then TERM=dumb, then whether it is a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    if os.environ.get("TERM") == "dumb":
        return False
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # a closed stream, or an object that is no stream but can write
        return False


def terminal_width(stream: TextIO | None = None) -> int:
    """Cells to render in: `COLUMNS`, else the terminal's width, else 100; never under 60 or over 120."""
    try:
        columns = int(os.environ.get("COLUMNS", ""))
    except ValueError:
        columns = 0
    if columns <= 0:
        try:
            columns = os.get_terminal_size((sys.stderr if stream is None else stream).fileno()).columns
        except internal_error(AttributeError, ValueError, OSError):
            columns = 0
    return min(max(columns or DEFAULT_WIDTH, MIN_WIDTH), MAX_WIDTH)


def _is_unicode(stream: TextIO) -> bool:
    return (getattr(stream, "encoding", None) or "").lower().replace("-", "").startswith("utf")
