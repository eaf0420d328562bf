"""A block of source as rows of text, with carets under what is marked.

Positions are counted in terminal cells, so that carets stand right under tabs, CJK text and emoji.
"""

from __future__ import annotations

from gradguard.reporting.source_blocks import Block, Mark
from gradguard.reporting.terminal.layout import ASCII, TAB, Glyphs, Row, Segment, cells, wrap

LEAD = 8  # cells of a long line that are shown before what is marked
MIN_LABEL = 28  # a label beside its carets is given at least so many cells, or goes below them


class _Line:
    """A source line ready to be shown: tabs expanded, dedented, cut to a window around its marks."""

    def __init__(self, text: str, dedent: int, available: int, focus: tuple[int, int] | None, glyphs: Glyphs) -> None:
        self.offsets = _offsets(text)
        self.text = _expand(text, self.offsets)
        low, high = dedent, self.offsets[-1]
        self.before = self.after = ""
        if high - low > available:
            low, high = self._window(low, high, available, focus or (0, 0), cells(glyphs.dots))
            self.before = glyphs.dots if low > dedent else ""
            self.after = glyphs.dots if high < self.offsets[-1] else ""
        self.low, self.high = low, high

    def _window(self, low: int, high: int, available: int, focus: tuple[int, int], dots: int) -> tuple[int, int]:
        start, end = self.offsets[focus[0]], self.offsets[focus[1]]
        room = available - 2 * dots
        # The whole focus in view with what stands before it, or else the focus from its start.
        if end - low <= room:
            first = low
        elif end - start <= room:
            first = min(start, max(start - LEAD, end - room))
        else:
            first = start - LEAD
        first = max(low, min(first, high - room))
        bounds = sorted(set(self.offsets))
        first = low if first <= low else next(bound for bound in bounds if bound >= first)
        last = max(bound for bound in bounds if bound <= first + room)
        return first, last

    def shown(self) -> str:
        start = _at_cell(self.text, self.low)
        return self.before + self.text[start : _at_cell(self.text, self.high)].rstrip() + self.after

    def cell(self, column: int) -> int:
        """The cell, in the shown text, at which character `column` of the source line begins."""
        at = self.offsets[min(column, len(self.offsets) - 1)]
        return min(max(at, self.low), self.high) - self.low + cells(self.before)


def _offsets(text: str) -> list[int]:
    """The cell at which each character begins, and the end: one more than there are characters."""
    if text.isascii() and "\t" not in text:
        return list(range(len(text) + 1))
    offsets = [0]
    base, run = 0, ""
    for character in text:
        if character == "\t":
            base += cells(run)
            base, run = base + TAB - base % TAB, ""
            offsets.append(base)
        else:
            run += character
            # Prefixes, not single characters: joined emoji are narrower than the sum of their parts.
            offsets.append(max(offsets[-1], base + cells(run)) if len(run) < 400 else offsets[-1] + cells(character))
    return offsets


def _expand(text: str, offsets: list[int]) -> str:
    if "\t" not in text:
        return text
    return "".join(" " * (offsets[i + 1] - offsets[i]) if c == "\t" else c for i, c in enumerate(text))


def _at_cell(text: str, cell: int) -> int:
    """Index of the character that begins at `cell` of a text without tabs."""
    if text.isascii():
        return min(cell, len(text))
    offsets = _offsets(text)
    return next((i for i, offset in enumerate(offsets) if offset >= cell), len(text))


def number_width(blocks: list[Block]) -> int:
    """Digits of the largest line number, so that the gutters of all blocks stand in one line."""
    return max((len(str(number)) for block in blocks for number in block.lines), default=2)


class _Painter:
    def __init__(self, block: Block, width: int, digits: int, glyphs: Glyphs) -> None:
        self.block, self.width, self.digits, self.glyphs = block, width, digits, glyphs
        self.multi = [mark for mark in block.marks if mark.end_line > mark.line]
        self.lanes = _lanes(self.multi)
        self.lane_count = max(self.lanes.values(), default=-1) + 1
        self.rows: list[Row] = []
        self.last = 0  # the line shown before this one
        numbered = block.rows()
        known = [line for line in numbered if line is not None]
        dedent = min((_indent(text) for _, text in known if text.strip()), default=0)
        available = width - digits - 4 - 2 * self.lane_count
        self.lines = {number: _Line(text, dedent, available, self._focus(number, len(text)), glyphs) for number, text in known}
        for line in numbered:
            self._source(line[0] if line else None)

    def _focus(self, number: int, length: int) -> tuple[int, int] | None:
        here = [mark for mark in self.block.marks if number in (mark.line, mark.end_line)]
        if not here:
            return None
        best = next((mark for mark in here if mark.culprit), here[0])
        start = best.column if best.line == number else 0
        return min(start, length), min(best.end_column if best.end_line == number else length, length)

    def _gutter(self, number: str = "", bar: str | None = None) -> Segment:
        return Segment(f" {number:>{self.digits}} {self.glyphs.bar if bar is None else bar} ", "gutter")

    def _starts_line(self, mark: Mark) -> bool:
        line = self.lines[mark.line]
        return not line.text[: mark.column].strip()

    def _margin(self, number: int, below: bool) -> list[Segment]:
        """The brackets of spans over several lines, left of the code of line `number`, or of the rows below it."""
        margin = [Segment("  ")] * self.lane_count
        for mark in self.multi:
            inside = mark.line <= number < mark.end_line if below else mark.line < number <= mark.end_line
            if inside:
                margin[self.lanes[mark]] = Segment(self.glyphs.bar + " ", _style(mark))
            elif not below and number == mark.line and self._starts_line(mark):
                margin[self.lanes[mark]] = Segment(self.glyphs.open + " ", _style(mark))
        return margin

    def _source(self, number: int | None) -> None:
        if number is None:
            self.rows.append([Segment(f" {self.glyphs.dots:<{self.digits + 3}}", "gutter"), *self._margin(self.last, below=True)])
            return
        self.last = number
        self.rows.append([self._gutter(str(number)), *self._margin(number, below=False), Segment(self.lines[number].shown())])
        line = self.lines[number]
        marks = [mark for mark in self.block.marks if mark.end_line == mark.line == number]
        for mark in sorted(marks, key=lambda mark: (not mark.culprit, mark.column)):
            start, end = line.cell(mark.column), line.cell(mark.end_column)
            self._mark(mark, self._margin(number, below=True), start, max(1, end - start))
        for mark in self.multi:
            if mark.line == number and not self._starts_line(mark):
                self._begin(mark)
        # From the inside out, so that no bracket crosses one that is still open.
        for mark in sorted(self.multi, key=lambda mark: -self.lanes[mark]):
            if mark.end_line == number:
                self._end(mark)

    def _begin(self, mark: Mark) -> None:
        """The row from the bracket to where the span begins within its first line."""
        margin = self._margin(mark.line, below=True)[: self.lanes[mark]]
        lead = " " if self.glyphs is ASCII else self.glyphs.open
        carets = f"{lead}{self._run(mark, self.lines[mark.line].cell(mark.column))}{self._glyph(mark)}"
        self.rows.append([self._gutter(), *margin, Segment(carets, _style(mark))])

    def _end(self, mark: Mark) -> None:
        margin = self._margin(mark.end_line, below=False)[: self.lanes[mark]]
        end = max(0, self.lines[mark.end_line].cell(mark.end_column) - 1)
        self._mark(mark, margin, 0, 1, self.glyphs.corner + self._run(mark, end))

    def _run(self, mark: Mark, cell: int) -> str:
        """The line from a bracket to `cell` of the code, over the lanes in between."""
        return self.glyphs.fill * (1 + 2 * (self.lane_count - self.lanes[mark] - 1) + cell)

    def _glyph(self, mark: Mark) -> str:
        return "^" if mark.culprit else self.glyphs.under

    def _mark(self, mark: Mark, margin: list[Segment], start: int, length: int, lead: str = "") -> None:
        """Carets, then the label beside them where it fits, below them where it does not."""
        carets = lead + " " * start + self._glyph(mark) * length
        style = _style(mark)
        left = self.digits + 4 + 2 * len(margin)
        beside = self.width - left - cells(carets) - 1
        row = [self._gutter(), *margin, Segment(carets, style)]
        self.rows.append(row)
        if not mark.label:
            return
        indent = start + cells(lead)
        below = self.width - left - indent
        size = cells(mark.label)
        if size <= beside or (size > below and beside >= MIN_LABEL):
            first, *rest = wrap(mark.label, beside)
            row.append(Segment(" " + first, style))
            indent = cells(carets) + 1
        else:
            if below < MIN_LABEL:
                indent = max(0, self.width - left - max(MIN_LABEL, min(size, 60)))
            rest = wrap(mark.label, max(MIN_LABEL, self.width - left - indent))
        self.rows.extend([self._gutter(), *margin, Segment(" " * indent + line, style)] for line in rest)


def _lanes(marks: list[Mark]) -> dict[Mark, int]:
    """A column for the bracket of each span over several lines; those that do not touch share one."""
    lanes: dict[Mark, int] = {}
    for mark in marks:
        taken = {lane for other, lane in lanes.items() if mark.line <= other.end_line and other.line <= mark.end_line}
        lanes[mark] = next(lane for lane in range(len(marks)) if lane not in taken)
    return lanes


def _style(mark: Mark) -> str:
    return "culprit" if mark.culprit else "related"


def _indent(text: str) -> int:
    return _offsets(text)[len(text) - len(text.lstrip())]


def snippet(block: Block, width: int, digits: int, glyphs: Glyphs) -> list[Row]:
    """The rows of a block: numbered source lines, carets and labels; labels alone where there is no source."""
    if block.lines:
        return _Painter(block, width, digits, glyphs).rows
    rows: list[Row] = []
    for mark in block.marks:
        text = mark.label or "here"
        indent = digits + 4
        lines = wrap(f"{text} (source not at hand)", max(MIN_LABEL, width - indent))
        rows.extend([Segment(" " * indent), Segment(line, _style(mark))] for line in lines)
    return rows
