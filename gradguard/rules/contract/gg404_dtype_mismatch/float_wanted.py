"""Dtypes and requiring grad: a gradient assigned in another dtype, and integers that are to require grad. Part of GG404."""

from __future__ import annotations

import ast
import re

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, dotted
from gradguard.analysis.program.expressions import argument, closed, keyword, last_part
from gradguard.analysis.program.provenance import Spot
from gradguard.analysis.program.scopes import Scope, frame_scopes
from gradguard.analysis.program.syntax import range_of
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan, TensorFacts
from gradguard.core.safe_read import UNKNOWN
from gradguard.fixes.edits import replaced
from gradguard.rules.contract.gg404_dtype_mismatch.dtypes import (
    INTEGERS,
    dtype_named,
    dtype_of,
    dtype_trace,
    made_dtype,
    written_dtype,
)

ASSIGNED = re.compile(r"assign a gradient with dtype '([\w ]+)' to a tensor with grad_dtype '([\w ]+)'")
_WHY = "A tensor and its gradient have the same dtype, and `.grad` is not converted when it is assigned."


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
        if owner and target is not None and dotted(target) is not None:
            fix = fix.model_copy(update={"patch": replaced(place.source, [(value, f"{closed(place.source, value)}.to({owner}.dtype)")])})
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
    way = dtype_trace(scopes[0], value, frozenset({kind}))
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
    scopes = frame_scopes(incident.user_frames[:2])
    if place is None or place.source is None or not scopes:
        return None
    call = place.call
    if call is not None and keyword(call, "requires_grad") is not None and not (place.callee or "").endswith("Parameter"):
        return _made_whole(place, call, scopes[0], "that requires grad", "Only floating-point and complex tensors can require grad.")
    data = _data(call, place.statement)
    name = "requires_grad" if call is None or (place.callee or "") == "setattr" else place.callee or "this"
    if data is None:
        return None
    wrong = frozenset(INTEGERS | {torch.bool})
    way = dtype_trace(scopes[0], data, wrong)
    value = scopes[0].evaluate(data)
    made_as = made_dtype(data, scopes[0]) if value is UNKNOWN else dtype_of(value)
    kind = str(made_as).removeprefix("torch.") if made_as in wrong else "integer"
    made = way.origin if way.origin is not None and way.certain and isinstance(way.origin.node, ast.expr) else None
    target = place.targets[0] if place.targets and call is not None else None
    what = f"`{target}`" if target else f"`{place.source.flat(data)}`"
    becomes = "a parameter" if name.endswith("Parameter") else "a tensor that requires grad"
    spot = made or Spot(scopes[0], data)
    related = [place.span(f"is to become {becomes} here", "context")] if spot.line != place.line else []
    article = "an" if kind.startswith("int") else "a"
    headline = (
        f"{what} is {article} {kind} tensor, and only floating-point (or complex) tensors can require grad"
        if name.startswith("requires_grad") or ("." in name and name.endswith("requires_grad_"))
        else f"{what} is made of {article} {kind} tensor, and `{name}` needs floating-point (or complex) numbers."
    )
    return Diagnosis(
        code="GG404",
        name="dtype-mismatch",
        headline=headline,
        culprit=spot.span("whole numbers", "culprit"),
        related=related,
        explanation="A gradient step moves a value by fractions, so only floating-point and complex tensors can require grad; "
        "`torch.tensor` of a list of integers makes int64.",
        fixes=[_floats(spot, made is not None)],
        confidence="certain",
    )


def drawn(incident: Incident) -> Diagnosis | None:
    """`torch.randn(..., dtype=torch.long)`: a distribution of real numbers, asked for in integers."""
    place, name = incident.place, str(getattr(incident.func, "__name__", ""))
    scopes = frame_scopes(incident.user_frames[:1])
    if name not in ("randn", "rand", "randn_like", "rand_like", "normal") or place is None or place.call is None or not scopes:
        return None
    return _made_whole(
        place, place.call, scopes[0], "of real numbers", f"`{name}` draws real numbers; whole ones come from `torch.randint`."
    )


def _made_whole(place: ResolvedSite, call: ast.Call, scope: Scope, what: str, why: str) -> Diagnosis | None:
    """A call that is asked for an integer tensor and for what only floats can be."""
    written = argument(call, "dtype")
    kind = made_dtype(call, scope) if written is None else written_dtype(written, scope)
    source = place.source
    if source is None or (kind is not None and kind not in INTEGERS | {torch.bool}):
        return None
    shown = str(kind).removeprefix("torch.") if kind is not None else "integer"
    return Diagnosis(
        code="GG404",
        name="dtype-mismatch",
        headline=f"`{place.callee or 'the call'}` is asked for {'an' if shown.startswith('int') else 'a'} {shown} tensor {what}",
        culprit=place.span(f"{shown}, and floating point at the same time", "culprit"),
        explanation=f"{why} A gradient step moves a value by fractions, and integers have none."
        if "require" in what
        else f"{why} Integers have no fractions.",
        fixes=[
            Fix(
                title="make it in floating point: `dtype=torch.float32`",
                safety="unsafe",
                patch=None if written is None or source.imports.get("torch") != "torch" else replaced(source, [(written, "torch.float32")]),
            )
        ],
        confidence="certain",
    )


def whole_scores(incident: Incident) -> Diagnosis | None:
    """`cross_entropy` of predicted class numbers in place of the scores of all classes."""
    place, args = incident.place, incident.args
    scores = args[0] if args and getattr(incident.func, "__name__", "") == "cross_entropy" else None
    scopes = frame_scopes(incident.user_frames[:1])
    call = None if place is None else place.call
    if not isinstance(scores, torch.Tensor) or scores.is_floating_point() or scores.is_complex() or place is None or not scopes:
        return None
    given = call.args[0] if call is not None and call.args else None
    text = scopes[0].source.flat(given) if given is not None else "its input"
    way = None if given is None else dtype_trace(scopes[0], given, frozenset({scores.dtype}))
    origin = way.origin if way is not None and way.certain else None
    return Diagnosis(
        code="GG404",
        name="dtype-mismatch",
        headline=f"`{text}` holds whole numbers, and `cross_entropy` takes the scores of all classes",
        culprit=place.span("takes scores (logits), one for each class", "culprit")
        if origin is None
        else origin.span("class numbers are made here, which have no derivative", "culprit"),
        related=[] if origin is None else [place.span("takes scores (logits), one for each class", "context")],
        explanation="The loss compares the scores of all classes with the number of the right one. Predicted class numbers, as `argmax` "
        "gives them, are neither scores nor differentiable.",
        fixes=[Fix(title="give it the model's scores, before `argmax`; class numbers are for the accuracy")],
        confidence="certain",
    )


def _data(call: ast.Call | None, statement: ast.stmt | None) -> ast.expr | None:
    """What is to require grad: `nn.Parameter`'s argument, what `requires_grad_` is called on, or whose `requires_grad` is set."""
    if call is None:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        return next((t.value for t in targets if isinstance(t, ast.Attribute) and t.attr == "requires_grad"), None)
    if isinstance(call.func, ast.Attribute) and call.func.attr == "requires_grad_":
        return call.func.value
    return argument(call, "data", 0) if last_part(call) in ("Parameter", "setattr") else None


def _floats(spot: Spot, known: bool) -> Fix:
    source, node = spot.scope.source, spot.node
    title = "make it in floating point: `dtype=torch.float32`, or `.float()`"
    if not isinstance(node, ast.expr):
        return Fix(title=title, safety="manual")
    written = argument(node, "dtype") if isinstance(node, ast.Call) and known else None
    change = (node, f"{closed(source, node)}.float()") if written is None else (written, "torch.float32")
    return Fix(title=title, safety="unsafe", patch=replaced(source, [change]))
