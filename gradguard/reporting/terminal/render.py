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
from typing import Literal, TextIO

from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.core.foreign_exceptions import internal_error
from gradguard.reporting import wording
from gradguard.reporting.patch_lines import Patch, read_patch
from gradguard.reporting.source_blocks import Block, build_blocks, shown_path
from gradguard.reporting.terminal.layout import ASCII, UNICODE, Glyphs, Row, Segment, cells, clean, one_line, paint, wrap
from gradguard.reporting.terminal.snippet import number_width, snippet
from gradguard.reporting.wording import headline

__all__ = ["headline", "print_diagnosis", "render", "render_for_error"]

Verbosity = Literal["quiet", "normal", "verbose"]

MIN_WIDTH, DEFAULT_WIDTH, MAX_WIDTH = 40, 100, 120
_PLAIN = str.maketrans({"–": "-", "—": "-", "’": "'", "‘": "'", "“": '"', "”": '"', "…": "...", "→": "->", "×": "x", "≤": "<=", "≥": ">="})
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z(])")
COLUMN = 10  # where the text of "why:", "fix:" and the like begins

# What is shown of long lists unless verbose; the rest is counted.
PLACES, NOTES, TENSORS, FIXES, AVOID, PATCH_LINES, TORCH_LINES = 5, 5, 6, 3, 3, 12, 16
LEAST_FACTS = 24  # cells that the facts of a tensor are given beside its name, or they stand below it


def render(
    diagnosis: Diagnosis,
    *,
    width: int = DEFAULT_WIDTH,
    color: bool = False,
    verbose: bool = False,
    unicode: bool | None = None,
    brief: bool = False,
    wrapped: bool = False,
) -> str:
    """The diagnosis as text without a final newline.

    Args:
        width: in terminal cells; source lines are cut to it and prose is wrapped to it, at white space only. The headline,
            patches, PyTorch's words and words longer than the width stick out rather than being broken (see `wrapped`).
        color: with ANSI colour codes.
        verbose: nothing is cut.
        unicode: draw with box characters; None: where the encoding of stderr is a Unicode one.
        brief: of PyTorch's words, the first sentence.
        wrapped: the headline and PyTorch's words are wrapped too: on a terminal, which would break them in the midst of a word.
    """
    if unicode is None:
        unicode = _is_unicode(sys.stderr)
    writer = _Writer(diagnosis, max(width, MIN_WIDTH), verbose, UNICODE if unicode else ASCII, wrapped)
    writer.write_all(brief and not verbose)
    return "\n".join(paint(row, color) for row in writer.rows)


def render_fixes(diagnosis: Diagnosis, *, width: int = DEFAULT_WIDTH, color: bool = False, unicode: bool | None = None) -> str:
    """The first line and the fixes alone: of a diagnosis that was shown before its fixes were tried."""
    writer = _Writer(
        diagnosis, max(width, MIN_WIDTH), False, UNICODE if (_is_unicode(sys.stderr) if unicode is None else unicode) else ASCII
    )
    writer.write_fixes()
    return "\n".join(paint(row, color) for row in writer.rows)


def render_verified(before: Diagnosis, after: Diagnosis, *, width: int = DEFAULT_WIDTH, unicode: bool | None = None) -> str:
    """What trials have found out about a diagnosis that was shown before: its fixes, and the whole where another line is the culprit."""
    show = render_fixes if (before.culprit, before.confidence) == (after.culprit, after.confidence) else render
    return show(after, width=width, unicode=unicode)


class _Writer:
    def __init__(self, diagnosis: Diagnosis, width: int, verbose: bool, glyphs: Glyphs, wrapped: bool = False) -> None:
        self.diagnosis, self.width, self.verbose, self.glyphs, self.wrapped = diagnosis, width, verbose, glyphs, wrapped
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
        title = wording.title(diagnosis)
        first, *rest = wrap(title, self.width) if self.wrapped else [title]
        self.rows.append([Segment(head, diagnosis.severity), Segment(first[len(head) :], "strong")])
        self.rows.extend([Segment(line, "strong")] for line in rest)

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
            self.rows.extend(self._header(block, digits))
            self.rows.extend(snippet(block, self.width, digits, self.glyphs))
        if rest := blocks[len(shown) :]:
            text = f"and {len(rest)} more: {', '.join(block.place for block in rest)}"
            self.rows.extend([Segment(" " * (digits + 2) + line, "dim")] for line in wrap(text, self.width - digits - 2))
        self._blank()

    def _header(self, block: Block, digits: int) -> list[Row]:
        """What the place is, where, and in which function; each on a row of its own where they do not fit beside each other."""
        indent = Segment(" " * (digits + 2))
        parts = [Segment(block.place, "path")]
        if block.culprit:
            parts.insert(0, Segment(wording.CULPRIT[self.diagnosis.confidence] + ":", "culprit"))
        if block.function and block.function != "<module>":
            parts.append(Segment(f"in {one_line(block.function)}"))
        rows: list[Row] = []
        used = 0
        for part in parts:
            size = cells(part.text)
            if rows and used + 1 + size <= self.width:
                rows[-1] += [Segment(" "), part]
                used += 1 + size
            else:
                rows.append([indent, part])
                used = len(indent.text) + size
        return rows

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
            if any(sum(cells(segment.text) for segment in row) > self.width for row in rows):  # further left there is room for more of it
                rows = [[Segment(row[0].text.removeprefix(" " * COLUMN), row[0].style), *row[1:]] for row in rows]
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
        for index, crumb in enumerate(diagnosis.breadcrumbs if self.verbose else ()):
            self._field_below(crumb) if index else self._field("before", crumb)
        if repeats := wording.repeats(diagnosis):
            self._field("again", repeats)
        self._field("more", wording.more(diagnosis))

    def _tensors(self) -> None:
        tensors = self.diagnosis.tensors
        if not tensors:
            return
        if self.verbose and self._tensor_table():
            return
        shown = wording.tensor_rows(tensors, self.glyphs.arrow)[: self._limit(TENSORS)]
        column = max((cells(name) for name, _ in shown if cells(name) <= 32), default=0)
        if COLUMN + column + 2 + LEAST_FACTS > self.width:
            self._tensors_below(shown)
            shown = []
        for index, (name, facts) in enumerate(shown):
            lead = "  tensor:" if not index else ""
            row = [Segment(f"{lead:<{COLUMN - 1}} ", "label"), Segment(name, "strong")]
            lines = wrap(facts, max(30, self.width - COLUMN - max(column, cells(name)) - 2))
            self.rows.append(row)
            if lines:
                row.append(Segment(" " * (max(0, column - cells(name)) + 2) + lines[0]))
            self.rows.extend([Segment(" " * (COLUMN + max(column, cells(name)) + 2) + line)] for line in lines[1:])
        if rest := tensors[len(tensors if self.verbose else tensors[:TENSORS]) :]:
            names = ", ".join(name for name, _ in wording.tensor_rows(rest))
            self._field_below(f"and {len(rest)} more: {names}")

    def _tensors_below(self, shown: list[tuple[str, str]]) -> None:
        """Names, and below each what is known of it: where the two have no room beside each other."""
        for index, (name, facts) in enumerate(shown):
            lead = "" if index else "  tensor:"
            self.rows.append([Segment(f"{lead:<{COLUMN - 1}} ", "label"), Segment(name, "strong")])
            self.rows.extend([Segment(" " * (COLUMN + 2) + line)] for line in wrap(facts, self.width - COLUMN - 2))

    def _tensor_table(self) -> bool:
        """All facts in columns, where they fit."""
        head, *table = wording.tensor_table(self.diagnosis.tensors, self.glyphs.arrow)
        widths = [max(cells(row[i]) for row in [head, *table]) for i in range(len(head))]
        if COLUMN + sum(widths) + 2 * (len(widths) - 1) > self.width:
            return False
        for index, row in enumerate([head, *table]):
            texts = [text + " " * (width - cells(text) + 2) for text, width in zip(row, widths, strict=True)]
            lead = "" if index else "  tensor:"
            first = Segment(texts[0], "strong" if index else "dim")
            self.rows.append([Segment(f"{lead:<{COLUMN - 1}} ", "label"), first, Segment("".join(texts[1:]), "" if index else "dim")])
        return True

    def _torch(self, brief: bool) -> None:
        message = self.diagnosis.torch_message
        if not message or not message.strip():
            return
        self._blank()
        self.rows.append([Segment("  PyTorch said:", "dim")])
        whole = clean(message).strip("\n")
        text = _SENTENCE_END.split(whole, maxsplit=1)[0] if brief else whole
        lines = text.split("\n")
        if self.wrapped:
            lines = [part for line in lines for part in wrap(line, self.width - 4) or [""]]
        shown = lines[: self._limit(TORCH_LINES)]
        self.rows.extend([Segment("    " + line, "dim")] for line in shown)
        if hidden := len(lines) - len(shown):
            self.rows.append([Segment(f"    and {hidden} more lines", "dim")])
        elif text != whole:
            more = "(and more, in the exception's text and in the report)"
            self.rows.extend([Segment("    " + line, "dim")] for line in (wrap(more, self.width - 4) if self.wrapped else [more]))


def render_for_error(diagnosis: Diagnosis) -> str:
    """The text of the exception: as wide as the terminal, no colour, and drawn in ASCII, because it travels through logs."""
    return render(diagnosis, width=terminal_width(), unicode=False)


def render_line(diagnosis: Diagnosis, color: bool = False) -> str:
    """The diagnosis in one line, `file:line: code headline`, which editors jump to."""
    place = diagnosis.place
    where = "" if place is None else f"{shown_path(place.file)}:{place.line}: "
    return paint([Segment(where, "path"), Segment(diagnosis.code, diagnosis.severity), Segment(f" {one_line(diagnosis.headline)}")], color)


def render_fix_line(diagnosis: Diagnosis) -> str:
    """What trials have made of the first fix, in one line of the same form."""
    place, fix = diagnosis.place, diagnosis.fixes[0]
    where = "" if place is None else f"{shown_path(place.file)}:{place.line}: "
    return f"{where}{diagnosis.code} fix: {wording.fix_title(fix)} ({wording.standing(fix)})"


def render_as(
    verbosity: Verbosity,
    diagnosis: Diagnosis,
    *,
    width: int,
    color: bool,
    unicode: bool | None = None,
    brief: bool = False,
    wrapped: bool = False,
) -> str:
    """The diagnosis in one line (and one more where its fix was tried), as a text, or as a text that nothing is left out of."""
    if verbosity == "quiet":
        tried = bool(diagnosis.fixes) and diagnosis.fixes[0].verified.why is not None
        return render_line(diagnosis, color) + (f"\n{render_fix_line(diagnosis)}" if tried else "")
    return render(diagnosis, width=width, color=color, verbose=verbosity == "verbose", unicode=unicode, brief=brief, wrapped=wrapped)


def print_diagnosis(
    diagnosis: Diagnosis, file: TextIO | None = None, *, color: bool | None = None, verbosity: Verbosity = "normal"
) -> None:
    """Print the diagnosis, to stderr unless told otherwise, in what the stream can show.

    Args:
        file: the stream; None: stderr as it is now.
        color: None: decided by `NO_COLOR`, `FORCE_COLOR`, `TERM` and whether the stream is a terminal.
        verbosity: quiet: one line; verbose: nothing is cut.
    """
    stream = sys.stderr if file is None else file
    if stream is None:  # pythonw and some services have no stderr
        return
    text = render_as(
        verbosity,
        diagnosis,
        width=terminal_width(stream),
        color=wants_color(stream) if color is None else color,
        unicode=_is_unicode(stream),
        brief=True,
        wrapped=is_terminal(stream),
    )
    stream.write(encodable(text, stream) + "\n")
    stream.flush()


def encodable(text: str, stream: TextIO) -> str:
    """The text in characters that the stream has: a name or a source line in others must not raise a second error."""
    encoding = getattr(stream, "encoding", None)
    if not encoding:
        return text
    if not _is_unicode(stream):
        text = text.translate(_PLAIN)
    return text.encode(encoding, "backslashreplace").decode(encoding)


def wants_color(stream: TextIO) -> bool:
    """Whether to colour what goes to `stream`: NO_COLOR, then FORCE_COLOR, then TERM=dumb, then whether it is a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.environ.get("TERM") != "dumb" and is_terminal(stream)


def is_terminal(stream: TextIO) -> bool:
    """Whether somebody looks at what is written to a stream as it comes."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # a closed stream, or an object that is no stream but can write
        return False


def terminal_width(stream: TextIO | None = None) -> int:
    """Cells to render in: `COLUMNS`, else the terminal's width, else 100; never under 40 or over 120."""
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
