"""Dtypes and requiring grad: a gradient assigned in another dtype, and integers that are to require grad. Part of GG404."""

from __future__ import annotations

import ast
import re

import torch

from gradguard.diagnosis import Diagnosis, Fix, SourceSpan, TensorFacts
from gradguard.evidence.source import dotted
from gradguard.evidence.syntax import range_of
from gradguard.fixes.edits import replaced
from gradguard.rules.contract.dataflow import Spot, trace
from gradguard.rules.contract.dtypes import INTEGERS, dtype_maker, dtype_named, dtype_of
from gradguard.rules.contract.scopes import Scope, frame_scopes
from gradguard.rules.incident import Incident

ASSIGNED = re.compile(r"assign a gradient with dtype '([\w ]+)' to a tensor with grad_dtype '([\w ]+)'")
_WHY = "A tensor and its gradient have the same dtype, and `.grad` is not converted when it is assigned."
_NUMPY = " NumPy computes in float64, and `torch.from_numpy` keeps that."


def assigned(incident: Incident) -> Diagnosis | None:
    """`p.grad = g` with a `g` of another dtype."""
    found, place = ASSIGNED.search(incident.message), incident.place
    if found is None or place is None or place.source is None:
        return None
    got, wanted = _word(found[1]), _word(found[2])
    statement = place.statement
    target = next((t for t in getattr(statement, "targets", ()) if isinstance(t, ast.Attribute) and t.attr == "grad"), None)
    owner = None if target is None else place.source.flat(target.value)
    value = statement.value if isinstance(statement, ast.Assign) else None
    shown = f"`{owner}`" if owner else "the tensor"
    span = place.span if value is None else Spot(Scope(place.source, place.enclosing_function or ast.Module([], [])), value).span
    fix = Fix(title=f"convert it: `.to({owner or 'p'}.dtype)`, or compute the gradient in {wanted}", safety="safe")
    related: list[SourceSpan] = []
    if isinstance(value, ast.expr):
        text = place.source.segment(value) or ""
        whole = text if isinstance(value, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) else f"({text})"
        if owner and target is not None and dotted(target) is not None:
            fix = fix.model_copy(update={"patch": replaced(place.source, [(value, f"{whole}.to({owner}.dtype)")])})
        related = _made(incident, value, got)
    return Diagnosis(
        code="GG404",
        name="dtype-mismatch",
        headline=f"A gradient of dtype {got} is assigned to {f'`{owner}.grad`' if owner else 'a `.grad`'}, but {shown} takes {wanted}.",
        culprit=span(f"{got} for a tensor of {wanted}", "culprit"),
        related=related,
        tensors=[TensorFacts(name=f"{owner}.grad", dtype=got), TensorFacts(name=owner, dtype=wanted)] if owner else [],
        explanation=_WHY
        if got == "float64"
        else "A tensor and its gradient have the same dtype; `.grad` is not converted when it is assigned.",
        fixes=[fix],
        confidence="certain",
    )


def _made(incident: Incident, value: ast.expr, got: str) -> list[SourceSpan]:
    """Where the gradient came by its dtype, if that is another place than the assignment."""
    scopes = frame_scopes(incident.user_frames[:2])
    kind = getattr(torch, got, None)
    if not scopes or not isinstance(kind, torch.dtype):
        return []
    way = trace(scopes[0], value, lambda item: None if dtype_of(item) is None else dtype_of(item) is kind, dtype_maker(frozenset({kind})))
    spot = way.origin
    if spot is None or not way.certain or range_of(spot.node) is None:
        return []
    if (spot.scope.source.filename, spot.line) == (scopes[0].source.filename, value.lineno):
        return []
    return [spot.span(f"made in {got} here", "made")]


def _word(name: str) -> str:
    found = dtype_named(name.removesuffix(" int"))
    return str(found).removeprefix("torch.") if found is not None else name


def whole_numbers(incident: Incident) -> Diagnosis | None:
    """Integers that are made a parameter, or told to require grad."""
    place = incident.place
    call = None if place is None else place.call
    if place is None or place.source is None or call is None:
        return None
    scopes = frame_scopes(incident.user_frames[:2])
    name = place.callee or "this"
    data = _data(call)
    if data is None or not scopes or not name.endswith(("Parameter", "requires_grad_")):
        return None
    wrong = frozenset(INTEGERS | {torch.bool})
    way = trace(scopes[0], data, lambda item: None if dtype_of(item) is None else dtype_of(item) in wrong, dtype_maker(wrong))
    value = scopes[0].evaluate(data)
    kind = f"{str(value.dtype).removeprefix('torch.')}" if isinstance(value, torch.Tensor) and value.dtype in wrong else "integer"
    made = way.origin if way.origin is not None and way.certain and isinstance(way.origin.node, ast.expr) else None
    target = place.targets[0] if place.targets else None
    what = f"`{target}`" if target else f"`{place.source.flat(data)}`"
    becomes = "a parameter" if name.endswith("Parameter") else "a tensor that requires grad"
    spot = made or Spot(scopes[0], data)
    related = [place.span(f"is to become {becomes} here", "context")] if spot.line != place.line else []
    return Diagnosis(
        code="GG404",
        name="dtype-mismatch",
        headline=f"{what} is made of {'an' if kind.startswith('int') else 'a'} {kind} tensor, and `{name}` needs floating-point "
        "(or complex) numbers.",
        culprit=spot.span("whole numbers", "culprit"),
        related=related,
        explanation="A gradient step moves a value by fractions, so only floating-point and complex tensors can require grad; "
        "`torch.tensor` of a list of integers makes int64.",
        fixes=[_floats(spot, made is not None)],
        confidence="certain",
    )


def _data(call: ast.Call) -> ast.expr | None:
    """What is to require grad: `nn.Parameter`'s argument, or what `requires_grad_` is called on."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "requires_grad_":
        return call.func.value
    return call.args[0] if call.args else next((k.value for k in call.keywords if k.arg == "data"), None)


def _floats(spot: Spot, known: bool) -> Fix:
    source, node = spot.scope.source, spot.node
    text = source.segment(node) if isinstance(node, ast.expr) else None
    title = "make it in floating point: `dtype=torch.float32`, or `.float()`"
    if text is None or not isinstance(node, ast.expr):
        return Fix(title=title, safety="manual")
    keyword = next((k for k in node.keywords if k.arg == "dtype"), None) if isinstance(node, ast.Call) and known else None
    if keyword is not None:
        return Fix(title=title, safety="unsafe", patch=replaced(source, [(keyword.value, "torch.float32")]))
    whole = text if isinstance(node, (ast.Call, ast.Name, ast.Attribute, ast.Subscript)) else f"({text})"
    return Fix(title=title, safety="unsafe", patch=replaced(source, [(node, f"{whole}.float()")]))
