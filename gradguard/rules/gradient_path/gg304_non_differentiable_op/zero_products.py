"""Products of two parameters that are all zero: the gradient of each is a multiple of the other, so neither ever changes."""

from __future__ import annotations

from typing import Any

import torch

from gradguard.analysis.graph.walk import is_accumulate
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.sites import same_place
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.rules.spans import attribute_set
from gradguard.torch_compat.private_api import node_sequence

_PRODUCTS = frozenset({"MmBackward0", "BmmBackward0", "MulBackward0", "MvBackward0", "DotBackward0"})
_SAME_VALUES = frozenset({
    "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0",
    "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "ExpandBackward0", "ToCopyBackward0", "CloneBackward0", "AliasBackward0",
})  # fmt: skip
_DEEP = 12

Factors = tuple[torch.Tensor, torch.Tensor]


def factors(node: Any) -> Factors | None:
    """Two different parameters, all zero, of which a node's two operands are multiples; None for any other node."""
    if node.name() not in _PRODUCTS:
        return None
    operands = [source for source, _ in node.next_functions if source is not None]
    if len(operands) != 2:
        return None
    one = _zero(operands[0], _DEEP)
    other = None if one is None else _zero(operands[1], _DEEP)
    return None if one is None or other is None or one is other else (one, other)


def _zero(node: Any, depth: int) -> torch.Tensor | None:
    """The leaf that makes a node's result zero whatever the data are: it is zero itself, and the result a multiple of it."""
    if is_accumulate(node):
        leaf = getattr(node, "variable", None)
        return leaf if type(leaf) is torch.nn.Parameter and not leaf.is_meta and not bool(leaf.detach().any()) else None
    if not depth or node.name() not in _PRODUCTS | _SAME_VALUES:
        return None
    for source, _ in node.next_functions:
        found = None if source is None else _zero(source, depth - 1)
        if found is not None:
            return found
    return None


def told(incident: Incident, node: Any, pair: Factors, shown: str) -> Diagnosis:
    """The diagnosis, with the line that made the first of the two."""
    place = incident.place_of_node(node_sequence(node))
    states = [incident.names.state(leaf) for leaf in pair]
    names = [f"`{state.full}`" if state is not None else "a parameter" for state in states]
    places = [attribute_set(type(state.owner), state.path.rpartition(".")[2]) for state in states if state is not None]
    made = [found for found in places if found is not None]
    product = None if place is None else place.span("their product: zero, and so is the derivative with respect to each", "context")
    culprit = (
        made[0].statement_span("zero, as the other factor is", "culprit")
        if made
        else None
        if place is None
        else place.span("multiplies two parameters that are both zero", "culprit")
    )
    related = [other.statement_span("zero, too", "declared") for other in made[1:2]]
    if product is not None and made:
        related.append(product)
    if incident.place is not None and not same_place(incident.place, place):
        related.append(incident.place.span(f"gives {names[0]} and {names[1]} a gradient of exactly zero", "backward"))
    return Diagnosis(
        code="GG304",
        name="non-differentiable-op",
        severity="warning",
        headline=f"the gradient of {shown} is exactly zero: {names[0]} and {names[1]} are both zero, and the loss only sees their product",
        culprit=culprit,
        related=related,
        explanation="The derivative of a product with respect to one factor is the other one. Where both are zero each gets a gradient of "
        "zero, and so in the next step: neither ever leaves zero by its gradient.",
        fixes=[
            Fix(
                title=f"Initialize one of the two with random values ({names[0]}, say) and leave the other at zero",
                safety="unsafe",
                detail="The product is zero at first all the same, and the factor that is zero gets a gradient.",
            )
        ],
    )
