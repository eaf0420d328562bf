"""Folding a long row of graph nodes into a few stretches, so that a picture of them can be read.

The nodes stand in a topological order. A stretch of such an order can be drawn as one node without making the graph cyclic, whatever
lies in it: so what is folded is always a stretch, never a set. Stretches follow the modules: all nodes of `encoder.3` that follow one
another are one. What lies near a fault is unfolded first, down to single nodes, as long as there is room.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Hashable, Sequence

Label = tuple[Hashable, ...]  # the way to a node's group, the widest first: ("encoder", "3", "linear1")
_NEAREST = 4  # of many parts of a stretch, so many are shown first, next to the fault; the others if there is room left


def fold(labels: Sequence[Label], pins: Sequence[int], room: int, roots: Sequence[int] = ()) -> list[range]:
    """The stretches of a row of nodes, in order.

    Args:
        labels: of each node, the groups it belongs to.
        pins: nodes at fault, which stand alone whatever comes; of too many, the last ones.
        room: how many stretches there may be, at most.
        roots: nodes that stand alone as well, and near which nothing need be unfolded.
    """
    if not labels:
        return []
    pinned = sorted(set(pins or roots))[-max(1, room // 3) :]
    alone = sorted({*pinned, *sorted(roots)[-2:]})
    found: list[range] = []
    start = 0
    for pin in alone:
        found += [range(start, pin)] * (pin > start) + [range(pin, pin + 1)]
        start = pin + 1
    found += [range(start, len(labels))] * (start < len(labels))
    deepest = max(map(len, labels)) + 1
    waiting: list[tuple[int, int, int, int, range]] = []  # distance from the nearest pin, the larger first

    def wait(stretch: range, level: int) -> None:
        if len(stretch) > 1:
            heapq.heappush(waiting, (_distance(stretch, pinned), -len(stretch), stretch.start, level, stretch))

    for stretch in found:
        wait(stretch, 0)
    count = len(found)
    kept = {stretch.start: stretch for stretch in found}
    while waiting and count < room:
        *_, level, stretch = heapq.heappop(waiting)
        parts: list[range] = [stretch]
        while len(parts) == 1 and level < deepest:
            level += 1
            parts = _parts(labels, stretch, level, deepest)
        left = room - count + 1
        rest = level
        if len(parts) > min(left, _NEAREST + 1):
            parts, rest = _nearest(parts, pinned, min(_NEAREST, left - 2)), level - 1
        if len(parts) < 2 or len(parts) > left:
            continue
        count += len(parts) - 1
        for part in parts:
            kept[part.start] = part
            wait(part, rest)
    return [kept[start] for start in sorted(kept)]


def _parts(labels: Sequence[Label], stretch: range, level: int, deepest: int) -> list[range]:
    """The stretch cut where the group changes, at so many levels down; at the deepest, into its nodes."""
    if level >= deepest:
        return [range(i, i + 1) for i in stretch]
    found, start = [], stretch.start
    for i in stretch[1:]:
        if labels[i][:level] != labels[i - 1][:level]:
            found.append(range(start, i))
            start = i
    return [*found, range(start, stretch.stop)]


def _nearest(parts: list[range], pinned: Sequence[int], most: int) -> list[range]:
    """Parts of a stretch of which only the nearest to a pin stand alone; what lies between them is one."""
    alone = set(sorted(parts, key=lambda part: _distance(part, pinned))[: max(0, most)])
    found: list[range] = []
    joined = False
    for part in parts:
        if part not in alone and joined:
            found[-1] = range(found[-1].start, part.stop)
        else:
            found.append(part)
        joined = part not in alone
    return found


def _distance(stretch: range, pinned: Sequence[int]) -> int:
    at = bisect_left(pinned, stretch.start)
    before = stretch.start - pinned[at - 1] if at else 1 << 30
    after = pinned[at] - stretch.stop + 1 if at < len(pinned) else 1 << 30
    return min(before, after)
