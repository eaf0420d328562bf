"""The part of a graph next to its root in which values are only summed, averaged and scaled: its leaves are the loss's terms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from gradguard.analysis.graph.older_releases import output_shape
from gradguard.analysis.graph.walk import is_accumulate
from gradguard.analysis.incident import Incident
from gradguard.torch_compat.private_api import node_sequence

SUMS = frozenset({"AddBackward0", "SubBackward0", "RsubBackward1", "RsubBackward0", "StackBackward0", "CatBackward0", "AddcmulBackward0"})
_LINEAR = frozenset({
    "MulBackward0", "DivBackward0", "NegBackward0", "MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1",
    "SqueezeBackward0", "SqueezeBackward1",
    "UnsqueezeBackward0", "ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0", "ToCopyBackward0", "SelectBackward0",
    "ExpandBackward0", "CloneBackward0",
    "UnbindBackward0", "NansumBackward0", "SliceBackward0", "PermuteBackward0", "TransposeBackward0", "AliasBackward0",
})  # fmt: skip


@dataclass
class Region:
    """`sums` are its summing nodes, nearest to the root first; `members` all its nodes; `ends` the first nodes outside it."""

    sums: list[Any] = field(default_factory=list)
    members: set[Any] = field(default_factory=set)
    ends: set[Any] = field(default_factory=set)


def region(roots: Iterable[Any], fed: Any, limit: int = 4_000) -> Region:
    """Walks from the roots through sums and scalings.

    A product counts as a scaling when only one factor has a path and the other had none to lose (`fed`: the sequence numbers
    of nodes that a cut value went into).
    """
    found = Region()
    stack = list(roots)
    while stack and len(found.members) < limit:
        node = stack.pop(0)
        if node in found.members or node in found.ends:
            continue
        name = node.name() if hasattr(node, "name") else ""
        sources = [source for source, _ in node.next_functions if source is not None]
        if name in SUMS:
            found.sums.append(node)
        elif not (name in _LINEAR and len(sources) == 1 and node_sequence(node) not in fed):
            found.ends.add(node)
            continue
        found.members.add(node)
        stack.extend(sources)
    return found


def is_pile(node: Any) -> bool:
    """Whether the node stacks or concatenates."""
    return str(node.name()).startswith(("Stack", "Cat"))


def of_terms(node: Any) -> bool:
    """Whether what is stacked can be terms of a loss, single numbers or one a sample: states of a rollout have more dimensions."""
    dims = _dims(node)
    return dims is not None and dims <= 1


def scalar(node: Any) -> bool:
    """Whether a node's result is a single number."""
    return _dims(node) == 0


def _dims(node: Any) -> int | None:
    """How many dimensions a node's result has; None where the node does not tell."""
    shape = output_shape(node)
    return None if shape is None else len(shape)


def constant_leaves(found: Region, roots: Iterable[Any]) -> list[Any]:
    """The leaves that every path from the roots reaches through the region only: their gradient is the same in every step."""
    from gradguard.analysis.graph.walk import walk

    inside = {end for end in found.ends if is_accumulate(end)}
    if not inside:
        return []
    outside: set[Any] = set()
    for node, edges in walk(roots):
        if node not in found.members:
            outside.update(edge.source for edge in edges)
    return [node.variable for node in inside if node not in outside and getattr(node, "variable", None) is not None]


def pathless_side(incident: Incident, node: Any) -> int | None:
    """Which operand of a sum of two has no graph, as written: 0 is the left one."""
    edges = [source for source, _ in node.next_functions]
    fact = incident.journal.op_at(node_sequence(node))
    if len(edges) != 2 or edges.count(None) != 1 or fact is None:
        return None
    side = edges.index(None)
    return 1 - side if getattr(fact.func, "__name__", "").startswith("__r") else side
