"""Ops that a backward made (`create_graph=True`): no line of the program stands for them, the op that was differentiated does."""

from __future__ import annotations

from typing import Any

from gradguard.analysis.graph.recompute import node_kind
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.core.diagnosis import Fix
from gradguard.instrumentation.facts import BackwardFact
from gradguard.instrumentation.journal import Journal
from gradguard.torch_compat.private_api import node_sequence

_INFINITE_AT_0 = {"Sqrt", "LinalgVectorNorm", "Norm"}  # whose derivative divides by their result
_MOST_NODES = 64


def derived_by(journal: Journal, node: Any) -> BackwardFact | None:
    """The traced backward that made a node, where it ran with `create_graph=True` and no op of the program came between."""
    seq = node_sequence(node)
    calls = [call for call in journal.backwards if call.step == journal.step and call.create_graph and call.traced and call.seq <= seq]
    if not calls or journal.op_at(seq) is not None:
        return None
    return None if any(calls[-1].seq <= op[0] <= seq for op in reversed(journal.ops)) else calls[-1]


def note(call: BackwardFact) -> str:
    """Why there is no line."""
    where = resolve(call.site)
    line = "" if where is None else f" on line {where.line}"
    return (
        f"the call{line} with `create_graph=True` made this op: it is part of a derivative, and its operands come from the op that was "
        "differentiated"
    )


def differentiated(journal: Journal, node: Any) -> ResolvedSite | None:
    """The one op nearest to such a node whose derivative divides by its own result."""
    if derived_by(journal, node) is None:
        return None
    order, found = [node], list[ResolvedSite]()
    seen = {node}
    for each in order:  # grows while it is read: up to the program's own ops, no further
        made = journal.op_at(node_sequence(each))
        if made is not None:
            place = resolve(made.site) if node_kind(each) in _INFINITE_AT_0 else None
            found += [] if place is None else [place]
            continue
        for source, _ in each.next_functions:
            if source is not None and source not in seen and len(order) < _MOST_NODES:
                seen.add(source)
                order.append(source)
    return found[0] if len({(place.file, place.line, place.column) for place in found}) == 1 else None


def repair() -> Fix:
    """For a derivative that divides by a root or a length of 0."""
    return Fix(
        title="keep the root or the length away from 0 where it is differentiated: `torch.sqrt(x + 1e-6)`, or move the point off 0",
        safety="manual",
        detail="the second derivative at 0 is about one over the root of this number: a very small one only makes it very large",
    )
