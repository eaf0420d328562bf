"""A memory report as one HTML page: a table, and what is saved for backward as two icicles, by module and by line.

The page is self-contained: inline SVG, no script, no font, no request. Each rectangle is as wide as its share of the bytes; its title shows
on hovering.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from html import escape

from gradguard.core.account import size
from gradguard.core.memory_report import HeldFor, MemoryReport
from gradguard.reporting.terminal.layout import clean, one_line

_WIDTH, _ROW, _LEAST = 1180, 26, 2.0
_CHARACTER = 6.9  # pixels a character takes
_STYLE = """
:root { color-scheme: light dark; --fg: #1b1f24; --bg: #fff; --soft: rgba(128,128,128,.12); --line: rgba(128,128,128,.35); }
body {
  margin: 2em auto; max-width: 1180px; padding: 0 1.2em; font: 14px/1.5 system-ui, sans-serif; background: var(--bg); color: var(--fg);
}
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin: 1.8em 0 .4em; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .2em .8em .2em 0; text-align: left; vertical-align: top; }
td.bytes, th.bytes { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; width: 7em; }
tr + tr td { border-top: 1px solid var(--soft); }
code { font: 12.5px ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.more { opacity: .65; }
body > svg { display: block; width: 100%; height: auto; } svg text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #10151c; }
svg rect { stroke: var(--bg); stroke-width: 1; } svg svg:hover > rect { filter: brightness(.9); }
@media (prefers-color-scheme: dark) { :root { --fg: #e2e6ea; --bg: #14171c; } }
"""
_KINDS = {"saved": "saved for backward", "older graphs": "graphs of older steps"}


@dataclass
class Cell:
    """A rectangle: the sum of what stands below it and of what is its own."""

    name: str
    nbytes: int = 0
    detail: str = ""
    cells: dict[str, Cell] = field(default_factory=dict)

    def put(self, path: list[str], nbytes: int, detail: str) -> None:
        """Adds bytes at the end of a path, and to all on the way."""
        self.nbytes += nbytes
        if not path:
            self.detail = detail
            return
        self.cells.setdefault(path[0], Cell(path[0])).put(path[1:], nbytes, detail)

    def depth(self) -> int:
        """How many rows it takes."""
        return 1 + max((cell.depth() for cell in self.cells.values()), default=0)


def memory_page(report: MemoryReport) -> str:
    """The page."""
    modules, lines = Cell("saved for backward"), Cell("saved for backward")
    for module in report.modules:
        modules.put((module.name or "outside any module").split("."), module.nbytes, _detail(module))
    for line in report.lines:
        if line.file is None:
            path = ["lines that were not seen"]
        else:
            path = [os.path.basename(line.file), line.function, f"{line.line}: {one_line(line.text)}"]
        lines.put(path, line.nbytes, _detail(line))
    heading = f"Memory at step {report.step}, {report.moment}"
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width'>",
        f"<title>{_text(heading)}</title><style>{_STYLE}</style></head><body><h1>{_text(heading)}</h1>",
        _kinds(report),
    ]
    if report.for_backward:
        parts += ["<h2>Saved for backward by module</h2>", icicle(modules), "<h2>Saved for backward by line</h2>", icicle(lines)]
        operations = [(each.nbytes, _code(each.name or "not known"), _detail(each)) for each in report.operations]
        parts += ["<h2>Saved for backward by operation</h2>", _table(operations)]
    if report.savings:
        savings = [(each.nbytes, _ticked(each.title), each.detail) for each in report.savings]
        parts += ["<h2>What would be freed</h2>", _table(savings)]
    return "".join([*parts, "</body></html>"])


def _kinds(report: MemoryReport) -> str:
    rows = [(nbytes, _text(_KINDS.get(kind, kind)), "") for kind, nbytes in report.kinds.items() if nbytes]
    if report.gradients > report.kinds.get("gradients", 0):
        rows.append((report.gradients, "gradients, once backward has made them", ""))
    for device in report.devices:
        more = f"at most {size(device.peak)}, {size(device.reserved)} reserved"
        rows.append((device.allocated, _text(f"allocated on {device.device}"), more))
    if report.rest:
        rows.append((report.rest, "the rest", "" if report.devices else "Python, libraries, data, memory not given back"))
    return _table(rows)


def _table(rows: list[tuple[int, str, str]]) -> str:
    lines = [f"<tr><td class='bytes'>{size(n)}</td><td>{what}</td><td class='more'>{_text(more)}</td></tr>" for n, what, more in rows]
    return f"<table>{''.join(lines)}</table>"


def icicle(root: Cell) -> str:
    """The cells as SVG, the root on top, the largest at the left."""
    shapes: list[str] = []
    _draw(root, 0.0, 0, _WIDTH / max(1, root.nbytes), root.nbytes, 0, shapes)
    return f"<svg viewBox='0 0 {_WIDTH} {root.depth() * _ROW}' role='img'>{''.join(shapes)}</svg>"


def _draw(cell: Cell, x: float, row: int, scale: float, total: int, hue: int, shapes: list[str]) -> None:
    width = cell.nbytes * scale
    if width < _LEAST:
        return
    share = 100 * cell.nbytes / max(1, total)
    label = f"{cell.name}  {size(cell.nbytes)}"
    room = int((width - 10) / _CHARACTER)
    shown = label if len(label) <= room else cell.name if len(cell.name) <= room else cell.name[: room - 1] + "…" if room > 3 else ""
    title = f"{cell.name}: {size(cell.nbytes)}, {share:.1f} %" + (f"; {cell.detail}" if cell.detail else "")
    color = "hsl(210 15% 82%)" if row == 0 else f"hsl({(28 + 47 * hue) % 360} 62% {min(90, 70 + 3 * row)}%)"
    # an inner svg cuts off what a wider font than expected would write over the neighbour
    shapes.append(
        f"<svg x='{x:.2f}' y='{row * _ROW}' width='{width:.2f}' height='{_ROW}'><title>{_text(title)}</title>"
        f"<rect width='100%' height='100%' rx='2' fill='{color}'/><text x='5' y='17'>{_text(shown)}</text></svg>"
    )
    for i, inner in enumerate(sorted(cell.cells.values(), key=lambda each: -each.nbytes)):
        _draw(inner, x, row + 1, scale, total, hue + (i if row < 2 else 0), shapes)
        x += inner.nbytes * scale


def _detail(held: HeldFor) -> str:
    return f"{held.tensors} tensor{'s' if held.tensors > 1 else ''}, largest {held.largest}"


def _text(text: str) -> str:
    return escape(clean(text), quote=True)


def _code(text: str) -> str:
    return f"<code>{_text(text)}</code>"


def _ticked(text: str) -> str:
    """Text with what stands between backticks as code."""
    return "".join(_code(part) if i % 2 else _text(part) for i, part in enumerate(text.split("`")))
