"""Which source lines to show for a diagnosis, and what is marked on them. No formatting: every reporter starts from here.

Sources are read through `linecache`, so notebook cells and code from other loaders work as they do in tracebacks.
"""

from __future__ import annotations

import linecache
import os
from dataclasses import dataclass, field

from gradguard.core.diagnosis import Diagnosis, Role, SourceSpan
from gradguard.core.foreign_exceptions import internal_error
from gradguard.reporting.notebook_cells import cell_name
from gradguard.reporting.terminal.layout import clean, one_line, visible

WHOLE = 4  # a span of so many lines is shown whole, a longer one by its first two lines and its last
LONGEST = 400  # of a longer span only so much is read
NEAR = 3  # spans without a function are shown together when they are so many lines apart

ROLE_LABELS: dict[Role, str] = {
    "culprit": "this is the bug",
    "saved": "saved for backward here",
    "changed": "changed here",
    "backward": "backward was called here",
    "made": "made here",
    "freed": "the graph was freed here",
    "cut": "the gradient's path is cut here",
    "carried": "carried over here",
    "declared": "declared here",
    "context": "",
}


@dataclass(frozen=True)
class Mark:
    """A marked stretch of the shown source; columns are characters of the shown lines, `end_column` exclusive."""

    line: int
    column: int
    end_line: int
    end_column: int
    label: str
    culprit: bool


@dataclass
class Block:
    """Source lines of one file shown together. `lines` is empty where no source is at hand; then `marks` have labels only."""

    span: SourceSpan
    file: str
    function: str | None
    verbatim: bool  # read from the file; otherwise the expression as the diagnosis remembers it
    lines: dict[int, str] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)

    @property
    def culprit(self) -> bool:
        """Whether the culprit is among the marks."""
        return any(mark.culprit for mark in self.marks)

    @property
    def place(self) -> str:
        """`file:line:column` (column 1-based, as editors count; none where the source is not at hand)."""
        place = f"{shown_path(self.file)}:{self.span.line}"
        return f"{place}:{self.marks[0].column + 1}" if self.verbatim else place

    def rows(self) -> list[tuple[int, str] | None]:
        """Numbered lines in order; None stands for lines left out. A gap of a single line is filled."""
        rows: list[tuple[int, str] | None] = []
        previous: int | None = None
        for number in sorted(self.lines):
            if previous is not None and number == previous + 2:
                between = _source_line(self.file, previous + 1) if self.verbatim else None
                rows.append(None if between is None else (previous + 1, between))
            elif previous is not None and number > previous + 2:
                rows.append(None)
            rows.append((number, self.lines[number]))
            previous = number
        return rows


def shown_path(file: str) -> str:
    """The path relative to the working directory when below it, as it is otherwise (`<stdin>` too); a notebook's cell by its number."""
    cell = cell_name(file)
    if cell is not None:
        return cell
    if file.startswith("<"):
        return clean(file)
    try:
        relative = os.path.relpath(file)
    except internal_error(ValueError, OSError):  # another drive; a working directory that is gone
        return clean(file)
    return clean(os.path.abspath(file) if relative.startswith(os.pardir) else relative)


def label_of(span: SourceSpan, culprit: bool) -> str:
    """What happened there: the span's own label, or its role in words."""
    if span.label:
        return one_line(span.label)
    return ROLE_LABELS["culprit" if culprit and span.role == "context" else span.role]


def story_spans(diagnosis: Diagnosis) -> list[tuple[SourceSpan, bool]]:
    """All places with "is it the culprit?", the culprit first; a related place that only repeats another is left out."""
    spans = [] if diagnosis.culprit is None else [(diagnosis.culprit, True)]
    seen = {_identity(span) for span, _ in spans}
    for span in diagnosis.related:
        identity = _identity(span)
        if identity not in seen:
            seen.add(identity)
            spans.append((span, False))
    return spans


def _identity(span: SourceSpan) -> tuple[object, ...]:
    return (span.file, span.line, span.end_line, span.column, span.end_column, label_of(span, False))


def build_blocks(diagnosis: Diagnosis) -> list[Block]:
    """The places of a diagnosis, culprit first, those of one function together."""
    blocks: list[Block] = []
    for span, culprit in story_spans(diagnosis):
        block = _block(span, culprit)
        host = next((other for other in blocks if _belongs(block, other)), None)
        if host is None:
            blocks.append(block)
        else:
            host.lines.update(block.lines)
            host.marks.extend(block.marks)
            host.function = host.function or block.function
    return blocks


def _belongs(block: Block, host: Block) -> bool:
    if block.file != host.file or not (block.verbatim and host.verbatim):
        return False
    if block.function and host.function:
        return block.function == host.function
    low, high = min(host.lines), max(host.lines)
    return low - NEAR <= block.span.line <= high + NEAR


def _block(span: SourceSpan, culprit: bool) -> Block:
    label = label_of(span, culprit)
    source: dict[int, str] = {}
    for number in range(span.line, min(span.end_line, span.line + LONGEST) + 1):
        if (line := _source_line(span.file, number)) is not None:
            source[number] = line
    verbatim = span.line in source and bool(source[span.line].strip())
    found = _columns(span, source, max(source)) if verbatim else None
    if found is None:  # no source, or not the source that ran
        verbatim = False
        source = _remembered(span)
        found = _whole(source) if source else (0, 0)
    last = max(source, default=span.line)
    mark = Mark(span.line, found[0], last, found[1], label, culprit)
    if len(source) > WHOLE:
        source = {number: line for number, line in source.items() if number in (span.line, span.line + 1, last)}
    return Block(span, span.file, span.function, verbatim, source, [mark])


def _source_line(file: str, number: int) -> str | None:
    line = linecache.getline(file, number)
    return visible(line.rstrip("\r\n\f")) if line else None


def _remembered(span: SourceSpan) -> dict[int, str]:
    return dict(enumerate(clean(span.text.strip("\n")).split("\n"), span.line)) if span.text and span.text.strip() else {}


def _columns(span: SourceSpan, source: dict[int, str], last: int) -> tuple[int, int] | None:
    """Start and end column of the span in the source; None when the source is not what the span was taken from."""
    first_line, last_line = source[span.line], source[last]
    wanted = _dense(span.text or "")
    start, end = span.column, span.end_column
    if start is not None and start < len(first_line):
        if end is None or not (start < end or last > span.line) or end > len(last_line) or end <= 0:
            end = len(last_line.rstrip())
        if not wanted or _dense(_cut(source, span.line, start, last, end)) == wanted:
            return start, end
    if not wanted:
        return _whole(source)
    if last == span.line and span.text and first_line.count(span.text) == 1:
        at = first_line.index(span.text)
        return at, at + len(span.text)
    if wanted in _dense(_cut(source, span.line, 0, last, len(last_line))):
        return _whole(source)
    return None


def _whole(source: dict[int, str]) -> tuple[int, int]:
    first, last = source[min(source)], source[max(source)]
    return len(first) - len(first.lstrip()), len(last.rstrip())


def _cut(source: dict[int, str], first: int, column: int, last: int, end_column: int) -> str:
    if first == last:
        return source[first][column:end_column]
    middle = [source.get(number, "") for number in range(first + 1, last)]
    return "\n".join([source[first][column:], *middle, source[last][:end_column]])


def _dense(text: str) -> str:
    return "".join(visible(text).split())
