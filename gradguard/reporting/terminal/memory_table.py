"""A memory report as text: what holds memory, what is saved for backward by line, module and operation, what could be freed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gradguard.core.account import size
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.memory_report import HeldFor, MemoryReport
from gradguard.reporting.terminal.layout import Row, Segment, cells, clean, one_line, paint, wrap

_LISTED = 8
_LEAST = 0.03  # of all that is saved for backward: a module with less has no row
_DEEPEST = 4
_BAR = 16
_TEXT = 14  # where what follows the sizes begins
_NARROW = 76  # cells in which a row has no room for its bar, and what is known of it stands below
_WORDS = {
    "saved": "saved for backward",
    "older graphs": "graphs of older steps",
}


def render_memory(report: MemoryReport, color: bool = False, width: int = 100) -> str:
    """The report as text of lines that fit in a terminal."""
    rows: list[Row] = [[Segment("gradguard: ", "dim"), Segment(f"memory at step {report.step}, {report.moment}", "strong")], []]
    rows += _kinds(report)
    total = report.for_backward
    if total:
        rows += _section("by line", total, [(each, _place(each.file, each.line, each.function), each.text) for each in report.lines], width)
        rows += _modules(report, width)
        rows += _section("by operation", total, [(each, each.name or "not known", "") for each in report.operations], width)
    if report.savings:
        rows += [[], [Segment("  what would be freed", "label")]]
        for saving in report.savings[:_LISTED]:
            rows.append([Segment(f"  {size(saving.nbytes):>10}  "), Segment(clean(saving.title), "fix")])
            rows += [[Segment(f"  {'':>10}  {line}", "dim")] for line in wrap(saving.detail, max(24, width - 14))]
    return "\n".join(paint(part, color) for row in rows for part in _fitted(row, width))


def _fitted(row: Row, width: int) -> list[Row]:
    """A row whose text is too long for the width, with the rest of it on rows below."""
    if len(row) == 1 and len(row[0].text) > _TEXT:
        row = [Segment(row[0].text[:_TEXT], row[0].style), Segment(row[0].text[_TEXT:], row[0].style)]
    if len(row) != 2 or sum(cells(segment.text) for segment in row) <= width:
        return [row]
    lead, text = row
    lines = wrap(text.text, max(24, width - cells(lead.text)))
    return [[lead, Segment(lines[0], text.style)], *([Segment(" " * cells(lead.text) + line, text.style)] for line in lines[1:])]


def _kinds(report: MemoryReport) -> Iterable[Row]:
    for kind, nbytes in report.kinds.items():
        if nbytes:
            yield [Segment(f"  {size(nbytes):>10}  {_WORDS.get(kind, kind)}")]
    if report.gradients > report.kinds.get("gradients", 0):
        yield [Segment(f"  {size(report.gradients):>10}  gradients, once backward has made them", "dim")]
    if report.hidden:
        yield [Segment(f"  {'?':>10}  {report.hidden} saved values that hooks of the program hold", "dim")]
    for device in report.devices:
        unused = f"{size(device.reserved - device.allocated)} more reserved and unused"
        text = f"  {size(device.allocated):>10}  allocated on {device.device}, at most {size(device.peak)}; {unused}"
        yield [Segment(text, "strong")]
    if report.rest:
        where = "of the devices" if report.devices else "of the process: Python, libraries, data, memory not given back"
        yield [Segment(f"  {size(report.rest):>10}  the rest {where}")]
    if report.process is not None and not report.devices:
        yield [Segment(f"  {size(report.process):>10}  in all", "strong")]


def _section(title: str, total: int, entries: Sequence[tuple[HeldFor, str, str]], width: int) -> list[Row]:
    rows: list[Row] = [[], [Segment(f"  saved for backward {title}", "label")]]
    narrow = width < _NARROW
    below = f"  {'':>10}  " if narrow else f"  {'':>10}  {'':>{_BAR}} "
    for held, name, text in entries[:_LISTED]:
        facts = f"{held.tensors} tensor{'s' if held.tensors > 1 else ''}, largest {held.largest}"
        bar = [] if narrow else _bar(held.nbytes / total, "culprit" if held is entries[0][0] else "related")
        row = [Segment(f"  {size(held.nbytes):>10}  "), *bar, Segment(clean(name), "path")]
        rows.append(row)
        if narrow:
            rows += [[Segment(below + line, "dim")] for line in wrap(facts, width - len(below))]
        else:
            row.append(Segment(f"  {facts}", "dim"))
        if text:
            short = one_line(text)
            room = width - len(below)
            while cells(short) > room:
                short = short[: room - 3].rstrip() + "..."
            rows.append([Segment(below + short, "dim")])
    left = entries[_LISTED:]
    if left:
        total_left = size(sum(held.nbytes for held, _, _ in left))
        rows.append([Segment(f"  {total_left:>10}  {below[14:]}{len(left)} more", "dim")])
    return rows


def _bar(share: float, style: str) -> Row:
    filled = round(_BAR * share)
    return [Segment("#" * filled, style), Segment("." * (_BAR - filled), "dim"), Segment(" ")]


@dataclass
class _Module:
    nbytes: int = 0
    inner: dict[str, _Module] = field(default_factory=dict)


def _modules(report: MemoryReport, width: int) -> list[Row]:
    """Modules as a tree, each with all that lies in it; what is too small to matter is left out."""
    total = report.for_backward
    root = _Module()
    for held in report.modules:
        at = root
        for name in ("outside any module",) if held.name is None else held.name.split("."):
            at = at.inner.setdefault(name, _Module())
            at.nbytes += held.nbytes
    rows: list[Row] = [[], [Segment("  saved for backward by module", "label")]]

    def show(module: _Module, prefix: str, depth: int) -> None:
        for name, inner in sorted(module.inner.items(), key=lambda item: -item[1].nbytes):
            if inner.nbytes < _LEAST * total or depth > _DEEPEST:
                continue
            while len(inner.inner) == 1 and next(iter(inner.inner.values())).nbytes == inner.nbytes:  # `model.encoder`, in one row
                following, inner = next(iter(inner.inner.items()))
                name = f"{name}.{following}"
            bar = [] if width < _NARROW else _bar(inner.nbytes / total, "related")
            rows.append([Segment(f"  {size(inner.nbytes):>10}  "), *bar, Segment(f"{prefix}{clean(name)}", "path")])
            show(inner, f"{prefix}  ", depth + 1)

    show(root, "", 0)
    return rows


def _place(file: str | None, line: int, function: str) -> str:
    if file is None:
        return "lines that were not seen"
    inside = "" if function == "<module>" else f" in {function}"
    return f"{_short(file)}:{line}{inside}"


def _short(file: str) -> str:
    """A path below the working directory as seen from there, any other by its last two parts."""
    try:
        relative = os.path.relpath(file)
    except internal_error(OSError, ValueError):
        relative = file
    return relative if not relative.startswith("..") else os.path.join(*file.split(os.sep)[-2:])
