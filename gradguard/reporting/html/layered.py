"""Where the nodes of a small directed graph stand in a picture: in layers, with few crossings (Sugiyama's method).

Users stand above what they use. An edge over several layers runs through waypoints, which take part in the ordering of their layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

_SWEEPS = 8
_GAP_X, _GAP_Y = 26.0, 38.0
_WAYPOINT = 14.0  # width


@dataclass
class Box:
    """A node or a waypoint: its centre and size."""

    width: float
    height: float
    layer: int = 0
    x: float = 0.0
    y: float = 0.0


@dataclass(frozen=True)
class Layout:
    """Boxes of the nodes, and for each edge the points it runs through, from user to source."""

    boxes: list[Box]
    ways: list[list[tuple[float, float]]]
    width: float
    height: float


def layered(sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]]) -> Layout:
    """Lays a graph out.

    Args:
        sizes: width and height of each node; nodes stand in an order in which every user comes after what it uses.
        edges: (user, source).
    """
    boxes = [Box(*size) for size in sizes]
    for user, source in sorted(edges, reverse=True):
        boxes[source].layer = max(boxes[source].layer, boxes[user].layer + 1)
    chains: list[list[int]] = []
    for user, source in edges:
        chain = [user]
        for layer in range(boxes[user].layer + 1, boxes[source].layer):
            chain.append(len(boxes))
            boxes.append(Box(_WAYPOINT, 0.0, layer))
        chains.append([*chain, source])
    up: dict[int, list[int]] = {i: [] for i in range(len(boxes))}
    down: dict[int, list[int]] = {i: [] for i in range(len(boxes))}
    for chain in chains:
        for above, below in pairwise(chain):
            up[below].append(above)
            down[above].append(below)
    layers = _ordered(boxes, up, down)
    _place(boxes, layers, up, down)
    for box in boxes:
        box.y += 1.0
    ways = [[point for i in range(len(chain)) for point in _ports(boxes, chain, i)] for chain in chains]
    width = max((box.x + box.width / 2 for box in boxes), default=0.0)
    height = max((box.y + box.height / 2 for box in boxes), default=0.0)
    return Layout(boxes[: len(sizes)], ways, width, height)


def _ordered(boxes: list[Box], up: dict[int, list[int]], down: dict[int, list[int]]) -> list[list[int]]:
    """The layers from the top, each in an order that makes few edges cross."""
    layers: list[list[int]] = [[] for _ in range(max((box.layer for box in boxes), default=-1) + 1)]
    for i, box in enumerate(boxes):
        layers[box.layer].append(i)
    best, fewest = [list(layer) for layer in layers], _crossings(layers, down)
    for sweep in range(_SWEEPS):
        towards = up if sweep % 2 == 0 else down
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            place = {i: at for row in layers for at, i in enumerate(row)}
            layer.sort(key=lambda i: median(places) if (places := [place[each] for each in towards[i]]) else place[i])
        crossings = _crossings(layers, down)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in layers], crossings
    return best


def _crossings(layers: list[list[int]], down: dict[int, list[int]]) -> int:
    count = 0
    for above, below in pairwise(layers):
        place = {i: at for at, i in enumerate(below)}
        ends = [place[each] for i in above for each in sorted(down[i], key=place.__getitem__)]
        count += sum(ends[i] > ends[j] for i in range(len(ends)) for j in range(i + 1, len(ends)))
    return count


def _place(boxes: list[Box], layers: list[list[int]], up: dict[int, list[int]], down: dict[int, list[int]]) -> None:
    y = 0.0
    for layer in layers:
        tallest = max(boxes[i].height for i in layer)
        x = 0.0
        for i in layer:
            box = boxes[i]
            box.x, box.y = x + box.width / 2, y + tallest / 2
            box.height = box.height or tallest
            x += box.width + _GAP_X
        y += tallest + _GAP_Y
    for sweep in range(2 * _SWEEPS):
        towards = up if sweep % 2 == 0 else down
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            _align(boxes, layer, [_wish(boxes, i, towards[i]) for i in layer])
    left = min((box.x - box.width / 2 for box in boxes), default=0.0)
    for box in boxes:
        box.x += 1.0 - left


def _wish(boxes: list[Box], i: int, neighbours: list[int]) -> float:
    return sum(boxes[each].x for each in neighbours) / len(neighbours) if neighbours else boxes[i].x


def _align(boxes: list[Box], layer: list[int], wishes: list[float]) -> None:
    """Moves the boxes of a layer as near as possible to where they wish to be, in their order and without overlap: those that would
    overlap form a block, which stands where its members wish on average."""
    blocks: list[tuple[float, int, list[float]]] = []  # the first member's place, how many, and what each wishes for the first
    offsets: list[float] = []
    at = 0.0
    for k, i in enumerate(layer):
        at += (boxes[layer[k - 1]].width / 2 + _GAP_X + boxes[i].width / 2) if k else 0.0
        offsets.append(at)
        block = (wishes[k] - at, 1, [wishes[k] - at])
        while blocks and blocks[-1][0] >= block[0]:
            _, count, wanted = blocks.pop()
            wanted = [*wanted, *block[2]]
            block = (sum(wanted) / len(wanted), count + block[1], wanted)
        blocks.append(block)
    k = 0
    for place, count, _ in blocks:
        for _ in range(count):
            boxes[layer[k]].x = place + offsets[k]
            k += 1


def _ports(boxes: list[Box], chain: list[int], i: int) -> list[tuple[float, float]]:
    """Where an edge touches the i-th box on its way: edges spread over a box's width towards where they come from, and run straight
    past the other boxes of a layer."""
    box = boxes[chain[i]]
    if 0 < i < len(chain) - 1:
        return [(box.x, box.y - box.height / 2), (box.x, box.y + box.height / 2)]
    other = boxes[chain[1] if i == 0 else chain[-2]]
    room = box.width / 2 - 18
    x = box.x + max(-room, min(room, (other.x - box.x) * 0.35))
    return [(x, box.y + (box.height / 2 if i == 0 else -box.height / 2))]
