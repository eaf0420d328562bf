"""How a divisor came to be 0, and what keeps it away from there: a bound after the fact is not always enough.

A square root is 0 where what is under it is: a clamp behind it leaves the root's infinite slope in the graph, and infinity times the
clamp's 0 is NaN in backward. An exponential is 0 where it has underflowed: what it stood for is lost, and a clamp does not bring it back.
"""

from __future__ import annotations

import ast
from typing import Any

from gradguard.analysis.graph.node_values import GraphValues
from gradguard.analysis.graph.recompute import node_kind
from gradguard.analysis.places.source import ResolvedSite, at_line
from gradguard.analysis.program.bindings import assignments_to, names_read
from gradguard.core.diagnosis import Fix
from gradguard.rules.numerics.ranges import elements

# ops through which zeros of an exponential come to a divisor: sums and products of it, and views
_CARRY = {
    *("Mm", "Bmm", "Mv", "Dot", "Mul", "Sum", "Mean", "T", "Transpose", "Permute", "View", "Unsqueeze", "Squeeze", "Expand", "Select"),
    *("Slice", "Clone", "Add"),
}
_VIEWS = {"T", "Transpose", "Permute", "View", "Unsqueeze", "Squeeze", "Expand", "Select", "Slice", "Clone", "ReshapeAlias", "UnsafeView"}
_DEPTH = 8


def zero_divisor(values: GraphValues, node: Any) -> tuple[list[Fix], Any]:
    """The fixes for a quotient whose divisor is 0, and the node of an exponential that has underflowed behind it."""
    inputs = values.inputs.get(node, [])
    divisor = inputs[1].node if len(inputs) > 1 else None
    if _root_of(values, divisor) is not None:
        return [
            Fix(
                title="add a small number under the root of the divisor: `(x.pow(2).sum(-1, keepdim=True) + 1e-12).sqrt()`",
                safety="manual",
                detail="`clamp(min=eps)` behind the root is not enough: the root's slope at 0 is infinite, and 0 times infinity is NaN",
            ),
            Fix(
                title="divide by `torch.linalg.vector_norm(...)` with a `clamp(min=eps)`, or use `F.normalize`",
                safety="manual",
                detail="PyTorch gives a norm the slope 0 at 0",
            ),
        ], None
    lost = _underflowed(values, divisor)
    if lost is not None:
        return [
            Fix(
                title="stay in logarithms (`torch.logsumexp`, `log_softmax`), or take the largest exponent out before `exp`",
                safety="manual",
                detail=f"`exp` has underflowed to 0 in {_zeros(values, lost)}: "
                "a `clamp(min=eps)` of the divisor would not bring back what is lost there",
            ),
            Fix(title="scale the exponent down (a larger temperature or regularisation)", safety="manual"),
        ], lost
    title = "keep the divisor away from 0: `clamp(min=eps)` (or `clamp(min=1)` for a count), or leave such rows out"
    return [Fix(title=title, safety="manual")], None


def made_of(place: ResolvedSite | None) -> tuple[ResolvedSite, str] | None:
    """Where the one variable that a divisor is computed from got its value, in the same function; and the variable."""
    quotient = None if place is None else place.node
    if place is None or place.source is None or not isinstance(quotient, ast.BinOp) or not isinstance(quotient.op, ast.Div):
        return None
    scope = place.enclosing_function or place.source.tree
    found = [
        (at, name)
        for name in names_read(place.source, [quotient.right])
        for made in (assignments_to(scope, name) if scope is not None else [])
        if made.lineno < place.line and (at := at_line(place.file, made.lineno)) is not None
    ]
    return found[0] if len(found) == 1 else None


def _root_of(values: GraphValues, node: Any) -> Any:
    """The square root that gave the divisor, as it is or in a view."""
    for _ in range(_DEPTH):
        if node is None:
            return None
        kind = node_kind(node)
        if kind == "Sqrt" or (kind == "Pow" and getattr(node, "_saved_exponent", None) == 0.5):
            return node
        if kind not in _VIEWS:
            return None
        inputs = values.inputs.get(node, [])
        node = inputs[0].node if inputs else None
    return None


def _zeros(values: GraphValues, node: Any) -> str:
    result = values.output(node)
    return "" if result is None else elements(int((result == 0).sum()), result.numel())


def _underflowed(values: GraphValues, node: Any) -> Any:
    """The exponential that the divisor is summed from, where most of it is 0; None where it is not, or it is made of something else."""
    queue, seen = [(node, 0)], {node}
    while queue:
        node, depth = queue.pop(0)
        if node is None:
            continue
        kind = node_kind(node)
        if kind == "Exp":
            result = values.output(node)
            if result is not None and int((result == 0).sum()) * 2 > result.numel():
                return node
        elif kind in _CARRY and depth < _DEPTH:
            for source in values.inputs.get(node, []):
                if source.node is not None and source.node not in seen:
                    seen.add(source.node)
                    queue.append((source.node, depth + 1))
    return None
