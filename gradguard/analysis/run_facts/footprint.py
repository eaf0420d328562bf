"""The lines of an untraced step, told from a traced one.

Training steps repeat themselves: the n-th op of a step stands on the same line as the n-th op of the step before. A
footprint is the kinds of the nodes of a traced graph with their sequence numbers; the nodes of an untraced graph are laid
over it, and where the kinds around a node agree, the journal's line for the traced one is its line too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gradguard.analysis.graph.walk import is_accumulate
from gradguard.core.callsite import CallSite
from gradguard.instrumentation.journal import Journal
from gradguard.torch_compat.private_api import node_sequence

MOST_NODES = 4_096
MOST_FOOTPRINTS = 12
_WINDOW = 48  # nodes around the one in question that must agree
_AGREEMENT = 0.8


@dataclass(frozen=True)
class Footprint:
    """The nodes of one traced graph: kinds by sequence number."""

    kinds: dict[int, str]

    @property
    def signature(self) -> tuple[str, ...]:
        """The kinds in the order they were made."""
        return tuple(self.kinds[seq] for seq in sorted(self.kinds))


def kinds_of(nodes: Iterable[Any]) -> dict[int, str]:
    """Kinds of nodes by sequence number, leaves left out."""
    return {node_sequence(node): type(node).__name__ for node in nodes if not is_accumulate(node)}


class Footprints:
    """The footprints of recent traced steps, bounded; holds no node and no tensor."""

    def __init__(self) -> None:
        self._kept: deque[Footprint] = deque(maxlen=MOST_FOOTPRINTS)

    def add(self, nodes: Sequence[Any]) -> None:
        """Remembers a traced graph, unless one just like it is remembered already."""
        if len(nodes) > 2 * MOST_NODES:
            return
        footprint = Footprint(kinds_of(nodes))
        if len(footprint.kinds) <= MOST_NODES and not any(kept.signature == footprint.signature for kept in self._kept):
            self._kept.append(footprint)

    def kept(self) -> list[Footprint]:
        """Those remembered, oldest first."""
        return list(self._kept)

    def site(self, journal: Journal, node: Any, nodes: Sequence[Any]) -> CallSite | None:
        """The line of a node: as traced, or as the nodes around it say; None where nothing fits well enough.

        Args:
            journal: where traced lines are.
            node: the node in question.
            nodes: all nodes of its graph.
        """
        seq = node_sequence(node)
        op = journal.op_at(seq)
        if op is not None:
            return op.site
        here = kinds_of(nodes)
        near = sorted(here, key=lambda other: abs(other - seq))[:_WINDOW]
        newest = max(here, default=seq)
        best: tuple[float, int, int] | None = None
        for age, footprint in enumerate(reversed(self._kept)):
            for candidate, kind in footprint.kinds.items():
                if kind != here.get(seq):
                    continue
                shift = seq - candidate
                score = sum(footprint.kinds.get(other - shift) == here[other] for other in near) / len(near)
                # of equals, the one as far from the loss; then the newest footprint
                rank = (round(score, 3), -abs((newest - seq) - (max(footprint.kinds) - candidate)) - age, candidate)
                if score >= _AGREEMENT and (best is None or rank > best):
                    best = rank
        if best is None:
            return None
        traced = journal.op_at(best[2])
        return None if traced is None else traced.site
