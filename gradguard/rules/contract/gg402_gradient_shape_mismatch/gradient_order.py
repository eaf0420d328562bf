"""Gradients that a custom backward returns in another order than forward's inputs stand in: told by the shapes of those inputs."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from gradguard.analysis.graph.older_releases import output_shape
from gradguard.analysis.graph.walk import walk
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.custom_functions import FunctionView
from gradguard.analysis.program.provenance import Spot
from gradguard.core.diagnosis import Fix
from gradguard.fixes.edits import replaced


def exchanged_with(incident: Incident, view: FunctionView, index: int, got: Sequence[int], expected: Sequence[int]) -> int | None:
    """The index of the only other input that has the shape which was returned at `index`; None where that can be chance.

    A gradient that was not summed over broadcast dimensions has the shape of the larger input as well, and is no matter of the order.
    PyTorch looks at the gradients in turn, so the other of two exchanged ones stands behind.
    """
    if _is_within(got, expected) or _is_within(expected, got) or sorted(got) == sorted(expected):
        return None
    for node, _ in walk(list(incident.root_nodes), limit=20_000):
        if getattr(node, "_forward_cls", None) is not view.cls or len(node.next_functions) != len(view.inputs):
            continue
        shapes = [_shape(source, number) for source, number in node.next_functions]
        like = [i for i, shape in enumerate(shapes) if shape == tuple(got)]
        if shapes[index] == tuple(expected) and len(like) == 1 and like[0] > index:
            return like[0]
    return None


def returned_in_order(view: FunctionView, index: int, other: int) -> tuple[Spot, Fix] | None:
    """The returned tuple, and the repair that exchanges the two; None where the source does not show both."""
    value = view.returned(len(view.inputs))
    if view.backward is None or not isinstance(value, ast.Tuple) or len(value.elts) != len(view.inputs):
        return None
    one, two = value.elts[index], value.elts[other]
    if any(isinstance(element, (ast.Constant, ast.Starred)) for element in value.elts):
        return None
    source = view.backward.source
    texts = source.segment(one), source.segment(two)
    patch = replaced(source, [(one, texts[1]), (two, texts[0])]) if texts[0] and texts[1] else None
    fix = Fix(
        title=f"return them in the order of forward's inputs: {', '.join(f'that of `{name}`' for name in view.inputs)}",
        safety="unsafe",
        patch=patch,
    )
    return Spot(view.backward, value), fix


def _shape(source: Any, number: int) -> tuple[int, ...] | None:
    leaf = getattr(source, "variable", None)
    if leaf is not None:
        return tuple(leaf.shape)
    return output_shape(source) if source is not None and number == 0 else None


def _is_within(few: Sequence[int], many: Sequence[int]) -> bool:
    """Whether the sizes stand among the others, in that order; dimensions of one element do not count."""
    rest = iter(many)
    return all(size in rest for size in few if size != 1)
