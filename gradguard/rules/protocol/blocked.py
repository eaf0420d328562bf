"""Parameters that a loss's graph leads to, and that backward gives nothing all the same: a custom Function returns None. Part of GG605."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradguard.analysis.live.custom_functions import FunctionView, view_of
from gradguard.analysis.places.source import resolve
from gradguard.analysis.program.definitions import returns_of
from gradguard.analysis.program.provenance import Spot
from gradguard.core.diagnosis import Fix, SourceSpan
from gradguard.monitors.cut_paths import Blocked
from gradguard.rules import wording
from gradguard.rules.protocol.cut_off import CutOff

_NOTHING = CutOff(
    None,
    [],
    "the graph of a loss leads there, and yet backward() gives nothing",
    Fix(title="Look at what `inputs=` of backward() leaves out, and at the backward of what stands between", safety="manual"),
)


def blocked(found: list[Blocked]) -> CutOff:
    """The one `return` of a Function's backward that gives no gradient for what the parameters are behind."""
    told: dict[tuple[str, int], tuple[Blocked, FunctionView, Spot, str | None]] = {}
    for each in found:
        kind = each.kind()
        view = None if kind is None else view_of(kind)
        if view is not None:
            for spot, name in _empty(view, *each.only):
                told.setdefault((spot.file, spot.line), (each, view, spot, name))
    if len(told) != 1:
        return _NOTHING
    each, view, spot, name = next(iter(told.values()))
    given = f"`{name}`" if name else "its input"
    at, back = resolve(each.applied), resolve(each.backward)
    related: list[SourceSpan] = wording.spans(
        None if at is None else at.span(f"`{view.name}` stands between the parameters and the loss here", "carried"),
        None if back is None else back.span("gets no further than that", "backward"),
    )
    first = view.backward.parameters()[1:2] if view.backward is not None else []
    fix = Fix(
        title=f"Return the gradient for {given} from `{view.name}.backward`",
        safety="manual",
        detail=f"A straight-through estimator, for what forward rounds or thresholds, hands on `{first[0]}` itself." if first else "",
    )
    clause = f"the `backward` of `{view.name}` returns None for {given}"
    return CutOff(spot.span("None: nothing goes on from here to what comes before", "culprit"), related, clause, fix)


def _empty(view: FunctionView, edge: int, edges: int) -> Iterator[tuple[Spot, str | None]]:
    """The returns of backward with None for a tensor input, by its place among the tensors; and what forward calls that input."""
    if view.backward is None:
        return
    for value in returns_of(view.backward):
        items = list(value.elts) if isinstance(value, (ast.Tuple, ast.List)) else [value]
        if any(isinstance(item, ast.Starred) for item in items):
            continue
        none = [isinstance(item, ast.Constant) and item.value is None for item in items]
        direct = len(items) == edges  # every input is a tensor
        if all(none) or (direct and none[edge]):
            inputs = view.inputs
            name = inputs[edge] if len(inputs) == edges else inputs[0] if edges == 1 and inputs and all(none) else None
            yield Spot(view.backward, value), name
