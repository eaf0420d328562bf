"""# GG409 requires-grad-nonleaf

## What it is
`requires_grad` was set on a tensor that was computed from tensors requiring grad.

## Why it is wrong
The flag is the user's choice for leaves only: a computed tensor requires grad because its inputs do. In a loop (an
adversarial attack, an optimised input) the tensor of the last round is such a result.

## Example
    for _ in range(steps):
        adv.requires_grad = True
        grad, = torch.autograd.grad(loss_of(adv), adv)
        adv = adv + eps * grad.sign()

## Use instead
        adv = (adv + eps * grad.sign()).detach()

## Fix safety
Unsafe in general: detach cuts the history. In an attack loop, where each round starts afresh, that is what is wanted.

## When it speaks, what silences it
When PyTorch refuses the assignment. The culprit is the line that made the tensor a result.
"""

from __future__ import annotations

import ast
import re

import torch

from gradguard.analysis.graph.walk import op_name, walk
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, assignments_to, dotted
from gradguard.analysis.program.definitions import Path, bound_value
from gradguard.analysis.program.expressions import closed, last_part
from gradguard.analysis.program.provenance import Spot, stores_of, trace
from gradguard.analysis.program.scopes import Scope, frame_scopes
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan, TensorFacts
from gradguard.core.safe_read import UNKNOWN
from gradguard.fixes.edits import replaced
from gradguard.rules.base import Rule
from gradguard.rules.contract.wording import untraced_note


def recognise(incident: Incident) -> Diagnosis | None:
    place = incident.place
    scopes = frame_scopes(incident.frames)
    receiver = _receiver(place)
    if place is None or place.source is None or not scopes:
        return None
    name = dotted(receiver) if receiver is not None else None
    tensor = scopes[0].evaluate(receiver) if receiver is not None else UNKNOWN
    if not isinstance(tensor, torch.Tensor):
        tensor = incident.args[0] if incident.args and isinstance(incident.args[0], torch.Tensor) else None
    if tensor is not None and (tensor.is_leaf or tensor.grad_fn is None):
        tensor = None
    switching_off = "use_computed_variable" in incident.message or "use a computed variable" in incident.message.lower()
    made, traced = maker(incident, scopes, name, tensor, place)
    op = op_name(tensor.grad_fn) if tensor is not None else None
    shown = f"`{name}`" if name else f"`{place.source.flat(receiver)}`" if receiver is not None else "The tensor"
    looped = made is not None and made.line > place.line and made.file == place.file
    culprit = None
    patch = None
    if made is not None:
        result = f" by `{op}`" if op else ""
        when = " in the round before" if looped else ""
        culprit = made.span(f"makes {shown} a computed tensor{result}{when}, with a history", "culprit")
        value = made.node.value if isinstance(made.node, (ast.Assign, ast.AugAssign)) else made.node
        if isinstance(value, ast.expr) and not switching_off and isinstance(made.node, ast.expr):
            patch = replaced(made.scope.source, [(value, f"{closed(made.scope.source, value)}.detach()")])
    related = [place.statement_span(f"`requires_grad` is set on {shown} here", "context")]
    related += _why(incident, tensor, made)
    fixes = [
        Fix(
            title=f"detach {shown} before the flag is set, where it is made",
            safety="unsafe",
            patch=patch,
            detail="Each round then starts from a leaf; the gradient with respect to it is not affected.",
        )
    ]
    avoid = [f"`{name or 'x'}.data`: it hides the history from autograd and from its checks."]
    if switching_off:
        fixes = [
            Fix(
                title=f"use a detached copy: `{name or 'x'} = {name or 'x'}.detach()`",
                safety="unsafe",
                detail="A result cannot be switched off; it can be left out.",
            ),
            Fix(title="compute it under `torch.no_grad()`, or freeze the parameters it is made from", safety="unsafe"),
        ]
        avoid = []
    setting = "off" if switching_off else "on"
    return Diagnosis(
        code="GG409",
        name="requires-grad-nonleaf",
        headline=f"`requires_grad` is switched {setting} for {shown}, but {shown} is a computed "
        f"tensor{f' (made by `{op}`)' if op else ''}, not a leaf.",
        culprit=culprit,
        related=related,
        tensors=[TensorFacts(name=name, shape=list(tensor.shape), dtype=str(tensor.dtype), requires_grad=True)]
        if tensor is not None
        else [],
        explanation="`requires_grad` can be chosen only for leaves, tensors that no differentiable operation made. A computed "
        "tensor requires grad because what it "
        "was computed from does" + (", and in the second round of the loop this tensor is the result of the first." if looped else "."),
        notes=[] if traced or culprit is None else [untraced_note(f"the line that made {shown}")],
        fixes=fixes,
        avoid=avoid,
        confidence="certain" if traced else "likely",
    )


def _receiver(place: ResolvedSite | None) -> ast.expr | None:
    """`x` in `x.requires_grad = True` and `x.requires_grad_()`."""
    node = None if place is None else place.node or place.statement
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.value
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        target = (place.target if place is not None else None) or (node.targets[0] if isinstance(node, ast.Assign) else node.target)
        return target.value if isinstance(target, ast.Attribute) else None
    return node.value if isinstance(node, ast.Attribute) else None


def maker(
    incident: Incident, scopes: list[Scope], name: str | None, tensor: torch.Tensor | None, place: ResolvedSite
) -> tuple[Spot | None, bool]:
    """The line that made the tensor: by the trace; else the assignment that names its operation, else the loop's last."""
    if tensor is not None and tensor.grad_fn is not None:
        traced = incident.place_of_node(int(tensor.grad_fn._sequence_nr()))
        if traced is not None and traced.source is not None and (traced.node or traced.statement) is not None:
            node = traced.node or traced.statement
            assert isinstance(node, (ast.expr, ast.stmt))
            return Spot(Scope(traced.source, traced.enclosing_function or ast.Module([], [])), node, name), True
    if name is None:
        return None, False
    found: list[Spot] = []
    if "." in name:
        owner, _, attribute = name.rpartition(".")
        value = scopes[0].evaluate(ast.parse(owner, mode="eval").body)
        if value is not UNKNOWN:
            found = stores_of(value, attribute)
    else:
        for statement in assignments_to(scopes[0].tree, name):
            bound = bound_value(statement, name)
            node = bound[0] if bound is not None else statement
            found.append(Spot(scopes[0], node, name))
            deeper = None if bound is None or tensor is None else _in_callee(scopes[0], *bound, tensor)
            if deeper is not None:
                found[-1] = deeper
    found = [spot for spot in found if not isinstance(spot.node, ast.Constant)]
    if tensor is not None and tensor.grad_fn is not None:
        op = re.sub(r"[^a-z]", "", op_name(tensor.grad_fn))
        naming = [spot for spot in found if _mentions(spot.node, op)]
        found = naming or found
    loops = place.enclosing_loops
    inside = [spot for spot in found if any(loop in spot.scope.source.ancestors(spot.node) for loop in loops)]
    return ((inside or found)[-1] if found else None), False


def _in_callee(scope: Scope, value: ast.expr, path: Path, tensor: torch.Tensor) -> Spot | None:
    """For what a function of the user's returns: the line in it that evidently does the tensor's last operation."""
    if not isinstance(value, ast.Call) or tensor.grad_fn is None:
        return None
    op = re.sub(r"[^a-z]", "", op_name(tensor.grad_fn))
    way = trace(
        scope,
        value,
        lambda item: item.grad_fn is not None if isinstance(item, torch.Tensor) else None,
        lambda expr, _: True if _mentions(expr, op) else None,
        path,
    )
    return way.origin if way.certain and way.origin is not None and way.origin.node is not value else None


_SIGNS = {"add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "div": ast.Div, "matmul": ast.MatMult, "pow": ast.Pow, "neg": ast.USub}


def _mentions(node: ast.AST, op: str) -> bool:
    """Whether the outermost operation of an expression is the one that a graph node stands for."""
    if isinstance(node, ast.Call):
        called = last_part(node)
        return re.sub(r"[^a-z]", "", called.lower()).startswith(op) or op.startswith(called.lower().strip("_") or "?")
    sign = _SIGNS.get(op)
    return sign is not None and isinstance(node, (ast.BinOp, ast.UnaryOp, ast.AugAssign)) and isinstance(node.op, sign)


def _why(incident: Incident, tensor: torch.Tensor | None, made: Spot | None) -> list[SourceSpan]:
    """Where its history comes from, when that is another traced line."""
    if tensor is None or tensor.grad_fn is None:
        return []
    for node, _ in walk([tensor.grad_fn], limit=64):
        place = incident.place_of_node(int(node._sequence_nr()))
        if place is not None and made is not None and (place.line, place.file) != (made.line, made.file):
            target = place.targets[0] if place.targets else None
            return [place.span(f"its history goes back over {f'`{target}`' if target else 'this'}", "carried")]
    return []


RULE = Rule(
    code="GG409",
    name="requires-grad-nonleaf",
    summary="requires_grad was set on a computed tensor",
    recognise=recognise,
    priority=50,
    messages=("you can only change requires_grad flags of leaf variables",),
)
