"""The part of the autograd graph around a fault, as SVG: the loss above, backward runs downwards."""

from __future__ import annotations

from html import escape
from itertools import pairwise
from zlib import crc32

from gradguard.core.evidence import GraphNode, GraphPart
from gradguard.reporting.html.layered import Box, Layout, layered
from gradguard.reporting.source_blocks import shown_path
from gradguard.reporting.terminal.layout import one_line

_WIDTH, _LINE, _PAD = 264.0, 15.0, 8.0
_MONO, _SANS = 6.7, 6.9  # width of a character
_LEGEND = {
    "root": "backward begins here",
    "written": "written after it was saved",
    "culprit": "the culprit's line",
    "named": "another line of the story",
    "cut": "the path is cut",
    "freed": "freed: used up by an earlier backward",
    "detached": "detached: backward never gets here",
}


def graph_picture(part: GraphPart) -> str:
    """The picture; texts are escaped."""
    texts = [_lines(node) for node in part.nodes]
    sizes = [(_WIDTH, 2 * _PAD + _LINE * len(lines) - 2) for lines in texts]
    layout = layered(sizes, [(edge.user, edge.source) for edge in part.edges])
    margin, key = 8, f"{crc32(repr(part).encode('utf-8', 'replace')):08x}"  # names in one page are told apart
    severed = {edge.user for edge in part.edges if edge.broken and part.nodes[edge.user].mark == "cut"}  # the cut is below these
    shapes = [
        _way(way, edge.broken, edge.source not in severed, part.nodes[edge.source].mark in ("freed", "detached"), key)
        for edge, way in zip(part.edges, layout.ways, strict=True)
    ]
    shapes += [_node(node, lines, box) for node, lines, box in zip(part.nodes, texts, layout.boxes, strict=True)]
    width, height = layout.width + 2 * margin, layout.height + 2 * margin
    return (
        f"<svg class='graph' width='{width:.0f}' height='{height:.0f}' viewBox='{-margin} {-margin} {width:.0f} {height:.0f}' role='img' "
        f"aria-label='autograd graph'>{_arrows(key)}{''.join(shapes)}</svg>{_legend(part, layout)}"
    )


def _arrows(key: str) -> str:
    frame = "viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto'"
    kinds = [
        f"<marker id='{kind}-{key}' class='{kind}' {frame}><path d='M0 0.5 L7.5 4 L0 7.5 z'/></marker>" for kind in ("arrow", "broken")
    ]
    return f"<defs>{''.join(kinds)}</defs>"


def facts_of(node: GraphNode) -> str:
    """Type and shape."""
    shape = "" if node.shape is None else "[" + ", ".join(map(str, node.shape)) + "]"
    return f"{node.dtype or ''} {shape}".strip()


def place_of(node: GraphNode) -> str:
    """File and line, or lines."""
    if node.file is None or node.line is None:
        return ""
    return f"{shown_path(node.file)}:{node.line}" + (f"–{node.last_line}" if node.last_line else "")


def _lines(node: GraphNode) -> list[tuple[str, str, str]]:
    """The lines of a box: (style, text at the left, text at the right)."""
    folded = node.count > 1
    shape = "" if node.shape is None else "[" + ", ".join(map(str, node.shape)) + "]"
    name = f"{node.count} operations" if folded else node.op + (f" → {node.name}" if node.name else "")
    if node.name and node.op.startswith(("the ", "an ")):  # no operation
        name = node.name
    lines = [("op", name, shape)]
    place = place_of(node).rsplit("/", 1)[-1]
    owner = node.module or (", ".join(node.leaves) if node.leaves else "")
    code = node.op if folded else one_line(node.text or "")
    if owner:
        lines.append(("where", owner, place))
    if code or (place and not owner):
        lines.append(("code", code, "" if owner else place))
    if node.note:
        lines.append(("note", node.note, ""))
    return lines


def _node(node: GraphNode, lines: list[tuple[str, str, str]], box: Box) -> str:
    x, y = box.x - box.width / 2, box.y - box.height / 2
    frame = f"width='{box.width:.0f}' height='{box.height:.0f}' rx='6'"
    classes = " ".join(part for part in ("node", node.mark, "fold" if node.count > 1 else "") if part)
    told = [f"{node.op}" + (f" ({node.count} nodes)" if node.count > 1 else ""), node.name or "", node.module or "", facts_of(node)]
    told += [place_of(node), one_line(node.text or ""), ", ".join(node.leaves), node.note]
    shapes = [f"<title>{_text(chr(10).join(each for each in told if each))}</title>"]
    if node.count > 1:
        shapes += [f"<rect class='behind' x='{shift}' y='{shift}' {frame}/>" for shift in (6, 3)]
    shapes.append(f"<rect {frame}/>")
    for i, (style, left, right) in enumerate(lines):
        at = _PAD + _LINE * (i + 1) - 4
        width = _MONO if style in ("code", "where") else _SANS
        room = int((box.width - 2 * _PAD - 4) / width)
        right = _end(right, room // 2) if left else _end(right, room)
        left = _short(left, room - len(right) - (2 if right else 0), middle=style == "where")
        shapes.append(f"<text class='{style}' x='{_PAD + 2:.0f}' y='{at:.0f}'>{_text(left)}</text>")
        if right:
            shapes.append(f"<text class='{style} right' x='{box.width - _PAD - 2:.0f}' y='{at:.0f}'>{_text(right)}</text>")
    return f"<g class='{classes}' transform='translate({x:.1f} {y:.1f})'>{''.join(shapes)}</g>"


def _way(points: list[tuple[float, float]], broken: bool, crossed: bool, grey: bool, key: str) -> str:
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(points):
        middle = (y0 + y1) / 2
        path += f" C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}"
    kind = "broken" if broken else "arrow"
    shape = f"<path class='edge {kind}{' grey' if grey and not broken else ''}' d='{path}' marker-end='url(#{kind}-{key})'/>"
    if broken and crossed:
        (x0, y0), (x1, y1) = points[0], points[1]
        x, y = (x0 + x1) / 2, (y0 + y1) / 2 - (3 if len(points) == 2 else 0)
        shape += f"<path class='cross' d='M{x - 5:.1f} {y - 5:.1f} l10 10 m0 -10 l-10 10'/>"
    return shape


def _legend(part: GraphPart, layout: Layout) -> str:
    used = dict.fromkeys(node.mark for node in reversed(part.nodes) if node.mark)
    items = [f"<span><i class='key {mark}'></i>{_LEGEND[mark]}</span>" for mark in used]
    if any(node.count > 1 for node in part.nodes):
        items.append("<span><i class='key fold'></i>folded: several operations</span>")
    nodes = f"{part.total} node{'s' if part.total != 1 else ''}"
    said = f"{nodes} in the whole graph" if part.whole else f"the first {nodes} of the graph"
    if part.left_out:
        said += f", {part.left_out} of them on other ways, which are not drawn"
    return f"<p class='legend'>{''.join(items)}{f'<span>{said}</span>' if part.total else ''}</p>"


def _short(text: str, most: int, middle: bool) -> str:
    """Text cut at its end, or in its middle."""
    if len(text) <= most:
        return text
    if most < 4:
        return ""
    if middle:
        return f"{text[: most // 3]}…{text[len(text) - (most - most // 3 - 1) :]}"
    return text[: most - 1] + "…"


def _end(text: str, most: int) -> str:
    return text if len(text) <= most else "…" + text[len(text) - most + 1 :]


def _text(text: str) -> str:
    return escape("\n".join(map(one_line, text.split("\n"))), quote=True)
