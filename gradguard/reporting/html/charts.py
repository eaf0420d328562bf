"""Gradient norms by layer over steps, and the timeline of the step protocol, as SVG."""

from __future__ import annotations

import math
from html import escape
from typing import NamedTuple

from gradguard.core.evidence import LayerGradient, ProtocolEvent
from gradguard.reporting.source_blocks import shown_path
from gradguard.reporting.terminal.layout import one_line

_ROWS, _COLUMNS = 32, 48
_CELL, _ROW, _NAMES, _VERDICTS = 13, 18, 230, 250
_FAR = 1e4  # a norm that has grown or shrunk so much is told
_LANES = ("zero_grad", "forward", "backward", "step")
_EVENT, _LANE, _LEFT = 26, 30, 92


class NormRow(NamedTuple):
    """A layer's norms, one a column (None: not recorded), and what is remarkable about them."""

    layer: str
    norms: list[float | None]
    verdict: str
    bad: bool


def norm_rows(layers: tuple[LayerGradient, ...]) -> tuple[list[str], list[NormRow], int]:
    """Column heads, rows, and how many layers are left out. Where there are too many, the remarkable ones stay."""
    steps = sorted({step for layer in layers for step, _ in layer.norms})[-_COLUMNS:]
    now = any(layer.now is not None for layer in layers)
    rows = []
    for layer in layers:
        known = dict(layer.norms)
        norms = [known.get(step) for step in steps] + ([layer.now] if now else [])
        recorded = [(str(step), known[step]) for step in steps if step in known]
        verdict = _verdict(recorded if layer.now is None else [*recorded, ("now", layer.now)])
        rows.append(NormRow(layer.layer, norms, *verdict))
    if len(rows) > _ROWS:
        bad = [i for i, row in enumerate(rows) if row.bad]
        stride = len(rows) / _ROWS
        kept = (bad[:_ROWS] + [i for k in range(_ROWS) if (i := int(k * stride)) not in bad])[:_ROWS]
        left_out = len(rows) - len(kept)
        return [*map(str, steps), *(["now"] * now)], [rows[i] for i in sorted(kept)], left_out
    return [*map(str, steps), *(["now"] * now)], rows, 0


def _verdict(norms: list[tuple[str, float]]) -> tuple[str, bool]:
    """What became of a layer's gradient, in words; whether that is remarkable."""
    if not norms:
        return "no gradient", True
    last = norms[-1][1]
    kind = (lambda value: not math.isfinite(value)) if not math.isfinite(last) else (lambda value: value == 0)
    if not math.isfinite(last) or last == 0:
        since = norms[-1][0]
        for step, value in reversed(norms):
            if not kind(value):
                break
            since = step
        what = "zero" if last == 0 else "NaN" if math.isnan(last) else "infinite"
        return f"{what} {'now' if since == 'now' else f'since step {since}'}", True
    finite = [value for _, value in norms if math.isfinite(value) and value]
    if last > _FAR * finite[0]:
        return f"{last:.1e}: blew up from {finite[0]:.1e}", True
    if last * _FAR < max(finite):
        return f"{last:.1e}: fell from {max(finite):.1e}", True
    return f"{last:.2g}", False


def norms_picture(layers: tuple[LayerGradient, ...]) -> str:
    """A row a layer, a cell a recorded step: the darker, the larger the norm."""
    heads, rows, left_out = norm_rows(layers)
    finite = [math.log10(value) for row in rows for value in row.norms if value and math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    shapes = []
    for k, head in enumerate(heads):
        if k in (0, len(heads) - 1) or (k % 8 == 0 and k < len(heads) - 5):
            shapes.append(f"<text class='axis middle' x='{_NAMES + k * _CELL + _CELL / 2:.1f}' y='11'>{head}</text>")
    for i, row in enumerate(rows):
        y = 18 + i * _ROW
        name = row.layer if len(row.layer) <= 33 else "…" + row.layer[-32:]
        shapes.append(f"<text class='code right' x='{_NAMES - 8}' y='{y + 13}'><title>{_text(row.layer)}</title>{_text(name)}</text>")
        for k, value in enumerate(row.norms):
            shapes.append(
                _cell(value, low, high, _NAMES + k * _CELL, y, f"{row.layer}, step {heads[k]}" if heads[k] != "now" else row.layer)
            )
        x = _NAMES + len(heads) * _CELL + 8
        shapes.append(f"<text class='{'bad' if row.bad else 'axis'}' x='{x}' y='{y + 13}'>{_text(row.verdict)}</text>")
    width, height = _NAMES + len(heads) * _CELL + _VERDICTS, 22 + len(rows) * _ROW
    said = [f"log scale, from {10**low:.1e} (faint) to {10**high:.1e} (strong)"] if finite else []
    said += [f"{left_out} layers that behave like these are left out"] * bool(left_out)
    return (
        f"<svg class='norms' width='{width}' height='{height}' viewBox='0 0 {width} {height}' role='img' aria-label='gradient norms'>"
        f"{''.join(shapes)}</svg><p class='legend'>{''.join(f'<span>{each}</span>' for each in said)}"
        "<span><i class='key nan'></i>NaN or infinite</span><span><i class='key zero'></i>exactly zero</span></p>"
    )


def _cell(value: float | None, low: float, high: float, x: int, y: int, what: str) -> str:
    if value is None:
        return ""
    if not math.isfinite(value):
        kind = "class='nan'"
    elif not value:
        kind = "class='zero'"
    else:
        share = (math.log10(value) - low) / (high - low) if high > low else 0.5
        kind = f"class='norm' fill-opacity='{0.1 + 0.9 * share:.2f}'"
    frame = f"x='{x + 0.5}' y='{y + 1.5}' width='{_CELL - 1}' height='{_ROW - 3}' rx='2'"
    return f"<rect {kind} {frame}><title>{_text(what)}: {value:.3g}</title></rect>"


def timeline_picture(events: tuple[ProtocolEvent, ...]) -> str:
    """A lane a kind of event, a column an event, grouped by step; the fault marked."""
    shapes = []
    width = _LEFT + len(events) * _EVENT + 150
    top = 22
    for i, kind in enumerate(_LANES):
        y = top + i * _LANE + _LANE / 2
        shapes.append(f"<line class='lane' x1='{_LEFT - 6}' x2='{_LEFT + len(events) * _EVENT + 4}' y1='{y}' y2='{y}'/>")
        shapes.append(f"<text class='axis right' x='{_LEFT - 14}' y='{y + 4}'>{kind}</text>")
    previous, label = None, -100
    points = []
    for k, event in enumerate(events):
        x, y = _LEFT + k * _EVENT + _EVENT / 2, top + _LANES.index(event.kind) * _LANE + _LANE / 2
        points.append((x, y))
        if event.step != previous:
            at = _LEFT + k * _EVENT
            shapes.append(f"<line class='step' x1='{at}' x2='{at}' y1='{top - 4}' y2='{top + 4 * _LANE}'/>")
            if at - label >= 46:
                shapes.append(f"<text class='axis' x='{at + 3}' y='12'>step {event.step}</text>")
                label = at
            previous = event.step
    shapes.insert(0, "<polyline class='way' points='" + " ".join(f"{x:.0f},{y:.0f}" for x, y in points) + "'/>")
    for event, (x, y) in zip(events, points, strict=True):
        place = f"{shown_path(event.file)}:{event.line}" if event.file else ""
        kind = event.fault or ("unknown" if not event.followed else "plain")
        told = _text(f"{event.text} {place}".strip())
        shapes.append(f"<g class='event {kind}'><title>{told}</title><circle cx='{x:.0f}' cy='{y:.0f}' r='{8 if event.fault else 6}'/>")
        if event.fault:
            shapes.append(f"<path d='M{x - 3.5:.1f} {y - 3.5:.1f} l7 7 m0 -7 l-7 7'/>")
        shapes.append("</g>")
    marked = [event for event in events if event.fault]
    words = "".join(
        f"<span><i class='key event {event.fault}'></i>{'the culprit' if event.fault == 'culprit' else 'noticed here'}: "
        f"{_text(event.text)}{f' at <code>{_text(shown_path(event.file))}:{event.line}</code>' if event.file else ''}</span>"
        for event in marked
    )
    height = top + len(_LANES) * _LANE + 4
    return (
        f"<svg class='timeline' width='{width}' height='{height}' viewBox='0 0 {width} {height}' role='img' aria-label='timeline'>"
        f"{''.join(shapes)}</svg><p class='legend'>{words}</p>"
    )


def _text(text: str) -> str:
    return escape(one_line(text), quote=True)
