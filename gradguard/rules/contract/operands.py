"""Which operand of a failing call is the odd one out, and where it was made: shared by the dtype and the device rule."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, assignments_to, dotted
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.provenance import Judge, Maker, Spot, Trace, operands_of, trace
from gradguard.analysis.program.scopes import Scope, callee_scope, frame_scopes
from gradguard.core.diagnosis import SourceSpan
from gradguard.core.safe_read import UNKNOWN, elements, parameters_in, store_of


@dataclass
class Operand:
    """The odd operand: the expression in the failing call, the way back to where it was made, and a name."""

    expression: ast.expr
    scope: Scope
    way: Trace
    name: str | None
    value: torch.Tensor | None
    cast: Spot | None = None  # the line that cast the array which the tensor was made from

    @property
    def origin(self) -> Spot | None:
        """Where it was made, where that is certain or at least outside the call itself."""
        spot = self.way.origin
        return spot if spot is not None and (self.way.certain or spot.node is not self.expression) else None


def tensors_at_hand(incident: Incident) -> list[torch.Tensor]:
    """The tensors of the failing call: its arguments, or the variables of torch's frames down to the user's."""
    found = [value for value in _flat((*incident.args, *incident.kwargs.values())) if isinstance(value, torch.Tensor)]
    for view in incident.all_frames:
        if view.is_user:
            break
        for value in view.locals.values():
            if isinstance(value, nn.Module):
                found += store_of(value, "_parameters").values()
            found += [item for item in _flat((value,)) if isinstance(item, torch.Tensor)]
    return found


def _flat(values: Any, depth: int = 0) -> list[Any]:
    found = []
    for value in values:
        if isinstance(value, (list, tuple)) and depth < 2:
            found += _flat(elements(value, 64), depth + 1)
        else:
            found.append(value)
    return found


def scope_at(incident: Incident, place: ResolvedSite) -> Scope | None:
    """The scope of a place: the live frame that stands in that function, else its bare source."""
    scopes = frame_scopes(incident.frames)
    tree = place.enclosing_function
    for scope in scopes:
        if scope.source.filename == place.file and scope.tree is (tree if tree is not None else scope.source.tree):
            return scope
    if place.source is None or place.source.tree is None:
        return None
    called = _called_from(scopes, tree) if tree is not None else None
    return called or Scope(
        place.source, tree or place.source.tree, {}, next((s.globals for s in scopes if s.source.filename == place.file), {})
    )


def _called_from(scopes: list[Scope], tree: ast.AST) -> Scope | None:
    """A function that has returned, with the call that led into it: found by following the calls in the frames' functions."""
    queue = [(scope, 0) for scope in scopes]
    seen: set[int] = set()
    while queue and len(seen) < 200:
        scope, depth = queue.pop(0)
        if id(scope.tree) in seen:
            continue
        seen.add(id(scope.tree))
        for call in inside(scope.tree, ast.Call):
            inner = callee_scope(scope, call)
            if inner is None:
                continue
            if inner.tree is tree:
                return inner
            if depth < 3:
                queue.append((inner, depth + 1))
    return None


def odd_operand(scope: Scope, node: ast.AST, judge: Judge, maker: Maker) -> Operand | None:
    """The operand of a call or operator that `judge` says yes to, or that evidently was made that way."""
    expressions = _operands(scope, node)
    verdicts = [(expression, judge(_part_of(scope, expression))) for expression in expressions]
    sure = [expression for expression, verdict in verdicts if verdict]
    # what is not a plain variable cannot be looked at; targets come last, and are at fault more often than predictions
    unknown = [expression for expression, verdict in verdicts if verdict is None][::-1]
    for expression in (*sure, *unknown):
        way = trace(scope, expression, judge, maker)
        if expression in sure or way.certain:
            value = _part_of(scope, expression)
            return Operand(expression, scope, way, named(scope, expression, way), value if isinstance(value, torch.Tensor) else None)
    return None


def _part_of(scope: Scope, expression: ast.expr) -> Any:
    """The value of an operand; of a part of a tensor, which is on the same device and of the same dtype, that of the whole."""
    value = scope.evaluate(expression)
    while value is UNKNOWN and isinstance(expression, ast.Subscript):
        expression = expression.value
        whole = scope.evaluate(expression)
        value = whole if isinstance(whole, torch.Tensor) else UNKNOWN
    return value


def _operands(scope: Scope, node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.AugAssign):
        return [node.target, node.value]
    if isinstance(node, ast.Assign):
        inner = [t for t in node.targets if isinstance(t, ast.Subscript)]
        return [*(part for t in inner for part in (t.value, t.slice)), node.value]
    if isinstance(node, ast.Subscript):
        return [node.value, *(node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice])]
    found: list[ast.expr] = []
    for operand in operands_of(node, scope) if isinstance(node, ast.expr) else ():
        found += (
            list(operand.elts)
            if isinstance(operand, (ast.Tuple, ast.List))
            else [operand.value]
            if isinstance(operand, ast.Starred)
            else [operand]
        )
    return found


def named(scope: Scope, expression: ast.expr, way: Trace) -> str | None:
    """What an operand is called: as written, else the first name that it had on its way."""
    plain = dotted(expression)
    if plain is not None:
        return plain
    if isinstance(expression, ast.Subscript) and isinstance(expression.slice, ast.Constant) and dotted(expression.value) is not None:
        return scope.source.flat(expression)
    names = [name for name in way.names if not name.startswith("_")]
    return names[0] if names else None


def model_gate(operand: Operand, expected: torch.dtype | None) -> Operand | None:
    """The operand at the call of the outermost module it was handed through, as it is; None unless all of that module has the dtype
    that was wanted: a conversion there suits every part of it."""
    scope, expression, gate = operand.scope, operand.expression, None
    while isinstance(expression, ast.Name) and not assignments_to(scope.tree, expression.id):
        given = scope.argument(expression.id)
        if given is None or scope.caller is None:
            break
        module = scope.values.get("self")
        if isinstance(module, nn.Module) and scope.function is not None and scope.function.name == "forward":
            floating = {p.dtype for p in parameters_in(module) if p.dtype.is_floating_point}
            if floating == {expected}:
                gate = Operand(given[1], given[0], Trace(), dotted(given[1]) or operand.name, operand.value)
        scope, expression = given
    return gate


def way_spans(operand: Operand, what: str) -> list[SourceSpan]:
    """The places between the origin and the use, for the reader to follow: at most three, in that order."""
    origin = operand.origin
    lines = {origin.line} if origin is not None else set()
    spans: list[SourceSpan] = []
    for spot in reversed(operand.way.spots[:-1]):
        if spot.line not in lines and not isinstance(spot.node, ast.Name):
            lines.add(spot.line)
            spans.append(spot.span(f"{what}, `{spot.name}` from here" if spot.name else what, "carried"))
    return spans[-2:]
