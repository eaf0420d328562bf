"""The calls that made a graph's nodes; of an untraced step, told from a traced one whose graph has the same nodes in the same order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gradguard.analysis.run_facts.footprint import Footprint, kinds_of
from gradguard.instrumentation.facts import OpFact
from gradguard.instrumentation.journal import Journal
from gradguard.torch_compat.private_api import node_sequence

_WIDEST = 4_096  # nodes that one recorded call may have made


class Lines(NamedTuple):
    """Which calls made a graph's nodes.

    Attributes:
        calls: by node.
        step: the step whose calls these are; None for the graph's own.
    """

    calls: dict[Any, OpFact]
    step: int | None = None


def lines_of(nodes: Sequence[Any], journal: Journal, footprints: Iterable[Footprint]) -> Lines:
    """The calls that made the nodes, as far as they were traced; else those of the last traced step that made the same graph.

    Args:
        footprints: of traced graphs, oldest first.
    """
    recorded: dict[int, OpFact] = {}
    for op in journal.ops:  # of nested calls, the inner one starts later
        recorded.update(dict.fromkeys(range(op[0], min(op[1], op[0] + _WIDEST)), OpFact(*op)))
    own = {node: recorded[number] for node in nodes if (number := node_sequence(node)) in recorded}
    if own or not nodes:
        return Lines(own)
    kinds = kinds_of(nodes)
    root = max(kinds)
    for footprint in reversed(list(footprints)):
        shift = root - max(footprint.kinds, default=root)
        if footprint.kinds != {number - shift: kind for number, kind in kinds.items()}:
            continue
        call = next((call for call in reversed(journal.backwards) if root - shift in call.root_seqs), None)
        calls = {node: recorded[number] for node in nodes if (number := node_sequence(node) - shift) in recorded}
        if calls and call is not None:
            return Lines(calls, call.step)
    return Lines({})
