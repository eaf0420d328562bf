"""# GG401 non-scalar-root

## What it is
`backward()` (or `autograd.grad`) was called on a tensor with more than one element and without `gradient=`.

## Why it is wrong
Backward computes the gradient of one number. For a vector there are as many losses as it has elements, and PyTorch cannot
know how they are to be weighed against each other: it asks for the vector of weights, or for one number.

## Example
    loss = F.cross_entropy(logits, target, reduction="none")
    loss.backward()

## Use instead
    loss = F.cross_entropy(logits, target, reduction="none")
    loss.mean().backward()

## Fix safety
Unsafe: mean and sum differ by a factor, which acts as another learning rate.

## When it speaks, what silences it
When PyTorch refuses to make the implicit gradient. The culprit is the last operation that left more than one element where
a number was wanted: scalings by a number and additions of scalars after it are passed over.
"""

from __future__ import annotations

import ast
from typing import Any

import torch

from gradguard.analysis.graph.older_releases import output_shape
from gradguard.analysis.graph.walk import op_name
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, dotted
from gradguard.analysis.program.definitions import returns_of
from gradguard.analysis.program.expressions import argument, inside, is_constant, last_part
from gradguard.analysis.program.provenance import Spot, Trace, nearest, operands_of, trace
from gradguard.analysis.program.scopes import Scope, callee_scope, frame_scopes
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan, TensorFacts
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import UNKNOWN
from gradguard.fixes.edits import replaced
from gradguard.rules.base import Rule
from gradguard.rules.contract.gg401_non_scalar_root.weights import each_elements_own, fixes_for_each, weights_argument
from gradguard.rules.contract.wording import a_shape, untraced_note
from gradguard.rules.wording import shape_of

_REDUCERS = {"mean", "sum", "item", "prod", "norm", "max", "min", "logsumexp", "nanmean", "dot", "trace"}
_SCALING = ("MulBackward", "DivBackward", "AddBackward", "SubBackward", "NegBackward", "RsubBackward")


def recognise(incident: Incident) -> Diagnosis | None:
    root = next((t for t in incident.roots if isinstance(t, torch.Tensor) and t.numel() != 1), None)
    complex_root = "real scalar" in incident.message
    if root is None and not complex_root:
        return None
    if root is None:
        root = next((t for t in incident.roots if isinstance(t, torch.Tensor) and t.is_complex()), None)
        if root is None:
            return None
    scopes = frame_scopes(incident.frames)
    place = incident.place
    expression = _root_expression(place, len(incident.roots) > 1, incident, root)
    name = (_plain(expression, place) if expression is not None else None) or incident.names.tensor(root)
    made = incident.place_of_node(_seq(_vector_node(root.grad_fn))) if root.grad_fn is not None and expression is None else None
    name = name or (made.targets[0] if made is not None and made.targets else None)
    call = "autograd.grad" if incident.where == "grad" else "backward()"
    shape = shape_of(root)
    culprit, related, spots = _culprit(incident, root, scopes, expression)
    each = name is not None and each_elements_own(incident, root)
    if place is not None and each:
        asked = place.span(f"asks for the derivative of {a_shape(shape)}, without `grad_outputs=`", "culprit")
        related = [culprit.model_copy(update={"label": f"leaves {a_shape(shape)} here", "role": "made"})] if culprit is not None else []
        culprit, spots = asked, None
    elif place is not None:
        related.append(place.span(f"{call} needs one number, and gets {a_shape(shape)}", "backward"))
    shown = f"`{name}`" if name else "The tensor that backward starts from"
    if complex_root and root.numel() == 1:
        return _of_complex(incident, root, shown, name, culprit, related, expression)
    what = f"a tensor of shape {shape} ({root.numel()} elements)"
    notes = [] if culprit is not None and spots is None else [untraced_note("the operation that made it")]
    if root.numel() == 0:
        notes.append("It has no element at all: a selection or a batch was empty.")
    aliases = [n for n, t in incident.names.tensor_bindings() if t is root and n != name][:2]
    if aliases:
        notes.append("The same tensor is also called " + ", ".join(f"`{n}`" for n in aliases) + ".")
    return Diagnosis(
        code="GG401",
        name="non-scalar-root",
        headline=f"{shown} is {what}, but {call} starts from a single number: reduce it first, or pass `{weights_argument(incident)}=`.",
        culprit=culprit,
        related=related,
        tensors=[TensorFacts(name=name, shape=list(root.shape), dtype=str(root.dtype), requires_grad=root.requires_grad)],
        explanation="Backward computes the gradient of one number. For several PyTorch would have to know how to weigh them "
        "against each other, "
        "so it makes the starting gradient by itself only for a tensor with one element.",
        notes=notes,
        fixes=fixes_for_each(incident, root, name) if each and name is not None else _fixes(incident, expression, name, made),
        confidence="certain" if culprit is not None and spots is None else "likely",
        avoid=[f"`{name}.mean()`: each derivative would come out {root.numel()} times too small, silently."]
        if each and root.numel() > 1
        else ["`loss[0].backward()` or `loss.max().backward()`: the other elements would not be trained on."],
    )


def _of_complex(
    incident: Incident,
    root: torch.Tensor,
    shown: str,
    name: str | None,
    culprit: SourceSpan | None,
    related: list[SourceSpan],
    expression: ast.expr | None,
) -> Diagnosis:
    """A single complex number: nothing is to be reduced, a real number is to be made of it."""
    place = incident.place
    related = [span.model_copy(update={"label": "starts from a real number"}) if span.role == "backward" else span for span in related]
    patch = None
    if expression is not None and place is not None and place.source is not None and isinstance(expression, (ast.Name, ast.Attribute)):
        patch = replaced(place.source, [(expression, f"{place.source.segment(expression)}.real")])
    text = name or "loss"
    return Diagnosis(
        code="GG401",
        name="non-scalar-root",
        headline=f"{shown} is a complex number, but backward() starts from a real one: take its real part or its magnitude.",
        culprit=(None if place is None else place.span("starts from a complex number", "culprit"))
        if culprit is None
        else culprit.model_copy(update={"label": "a complex number"}),
        related=[] if culprit is None else related,
        tensors=[TensorFacts(name=name, shape=list(root.shape), dtype=str(root.dtype), requires_grad=root.requires_grad)],
        explanation="Only of a real number is it clear what smaller means, and so in which direction a step goes. A loss of complex values "
        "is made real first.",
        fixes=[
            Fix(title=f"take the real part: `{text}.real`", safety="unsafe", patch=patch),
            Fix(title=f"take the magnitude: `{text}.abs()` (of complex differences: `.abs().pow(2)`, before the mean)", safety="unsafe"),
        ],
        confidence="certain",
    )


def _plain(expression: ast.expr, place: ResolvedSite | None) -> str | None:
    if place is None or place.source is None:
        return None
    text = place.source.flat(expression)
    return text if dotted(expression) else text if len(text) <= 60 else None


def _root_expression(place: ResolvedSite | None, several: bool, incident: Incident, root: torch.Tensor) -> ast.expr | None:
    """The expression whose value backward was called on."""
    call = None if place is None else place.call
    if call is None:
        return None
    found: ast.expr | None
    if isinstance(call.func, ast.Attribute) and call.func.attr == "backward" and dotted(call.func.value) != "torch.autograd":
        owner = place.callee_full_name if place is not None else None
        scaler = owner is not None and call.args and not isinstance(call.args[0], ast.Constant) and _is_forwarder(incident, call)
        found = call.args[0] if scaler else call.func.value
    else:
        found = argument(call, "tensors", 0) or argument(call, "outputs")
    if isinstance(found, (ast.Tuple, ast.List)):
        index = next((i for i, t in enumerate(incident.roots) if t is root), 0)
        found = found.elts[index] if index < len(found.elts) else None
    scopes = frame_scopes(incident.user_frames[:1])
    value = scopes[0].evaluate(found) if found is not None and scopes else UNKNOWN
    # a framework's line (`trainer.fit(model)`) starts backward of something else than what it is given
    return found if value is UNKNOWN or issubclass(type(value), torch.Tensor) else None


def _is_forwarder(incident: Incident, call: ast.Call) -> bool:
    """Whether `x.backward(loss)` is somebody else's backward (an engine's, an accelerator's), not a tensor's."""
    scopes = frame_scopes(incident.user_frames[:1])
    value = scopes[0].evaluate(call.func.value) if scopes and isinstance(call.func, ast.Attribute) else UNKNOWN
    return value is not UNKNOWN and not isinstance(value, torch.Tensor)


def _culprit(
    incident: Incident, root: torch.Tensor, scopes: list[Scope], expression: ast.expr | None
) -> tuple[SourceSpan | None, list[SourceSpan], Trace | None]:
    """The line that made the vector; from the trace of the step where there is one, else from the source."""
    node = root.grad_fn
    if node is not None:
        found = _vector_node(node)
        place = incident.place_of_node(_seq(found))
        if place is not None:
            related = _unreduced(incident, found, place)
            target = f"`{place.targets[0]}`" if place.targets else "the result"
            label = f"`{op_name(found)}` leaves {a_shape(_shape(found) or shape_of(root))} here; {target} is never reduced to one number"
            return place.span(label, "culprit"), related, None
    if expression is None or not scopes:
        return None, [], Trace()
    way = trace(scopes[0], expression, _judge, _makes_vector)
    spot = way.origin
    if spot is None:
        if not isinstance(expression, (ast.Name, ast.Attribute)):
            spot = Spot(scopes[0], expression)
        else:
            return None, [], way
    related = _declared(spot, None)
    return spot.span("this leaves more than one element, and nothing after it reduces them", "culprit"), related, way


def _judge(value: Any) -> bool | None:
    return value.numel() != 1 if isinstance(value, torch.Tensor) else None


def _makes_vector(expr: ast.expr, scope: Scope) -> bool | None:
    if isinstance(expr, ast.Call):
        if last_part(expr) in _REDUCERS:
            arguments = [a for a in expr.args if not _is_tensor_argument(a)] + list(expr.keywords)
            return bool(arguments)
        return True
    if isinstance(expr, ast.BinOp):
        sides = [_scalar(side, scope) for side in (expr.left, expr.right)]
        return None if any(sides) else True
    return True if isinstance(expr, ast.Compare) else None


def _is_tensor_argument(node: ast.expr) -> bool:
    return not isinstance(node, (ast.Constant, ast.UnaryOp, ast.Tuple, ast.List))


def _scalar(node: ast.expr, scope: Scope, depth: int = 0) -> bool:
    """Whether an expression evidently gives one number."""
    if depth > 6:
        return False
    value = scope.evaluate(node)
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    if isinstance(value, (int, float)):
        return True
    if isinstance(node, (ast.BinOp, ast.UnaryOp)):
        return all(_scalar(part, scope, depth + 1) for part in operands_of(node, scope))
    if isinstance(node, ast.Name):
        made = [each for each in nearest(scope.source, node) if each.kind == "assign"][:1]
        return any(not each.path and each.value is not None and _scalar(each.value, scope, depth + 1) for each in made)
    if isinstance(node, ast.Call):
        inner = callee_scope(scope, node)
        if inner is not None:
            returned = returns_of(inner)
            return bool(returned) and all(_scalar(value, inner, depth + 1) for value in returned)
        return _makes_vector(node, scope) is False
    return False


def _vector_node(node: Any) -> Any:
    """Goes back over scalings by numbers and additions of scalars to the operation that made the elements."""
    for _ in range(16):
        if not node.name().split("::")[-1].startswith(_SCALING):
            return node
        edges = [source for source, _ in node.next_functions if source is not None]
        own = _shape(node)
        vectors = [source for source in edges if _shape(source) == own]
        others = [source for source in edges if source not in vectors]
        if own is None or len(vectors) != 1 or any(_numel(source) != 1 for source in others) or not _by_scalar(node, len(edges)):
            return node
        if getattr(vectors[0], "variable", None) is not None:
            return node
        node = vectors[0]
    return node


def _by_scalar(node: Any, edges: int) -> bool:
    """Whether the operand that has no edge of its own is a number or a one-element tensor."""
    if edges > 1:
        return True
    for name in ("_saved_other", "_saved_self"):
        try:
            operand = getattr(node, name, None)
        except internal_error(RuntimeError):
            continue
        if isinstance(operand, torch.Tensor) and operand.numel() != 1:
            return False
    name = node.name().split("::")[-1]
    # adding and subtracting save nothing: another operand without a gradient may be a vector of its own
    return not name.startswith(("AddBackward", "SubBackward", "RsubBackward"))


def _shape(node: Any) -> list[int] | None:
    shape = output_shape(node)
    if shape is not None:
        return list(shape)
    variable = getattr(node, "variable", None)
    return None if variable is None else list(variable.shape)


def _numel(node: Any) -> int | None:
    shape = _shape(node)
    if shape is None:
        return None
    total = 1
    for n in shape:
        total *= n
    return total


def _seq(node: Any) -> int:
    return int(node._sequence_nr())


def _unreduced(incident: Incident, node: Any, culprit: ResolvedSite) -> list[SourceSpan]:
    """Where `reduction="none"` was chosen, for the loss on the way to the root."""
    from gradguard.analysis.graph.walk import walk

    for inner, _ in walk([node], limit=40):
        if getattr(inner, "_saved_reduction", None) == 0 or "CrossEntropy" in inner.name() or "NllLoss" in inner.name():
            place = incident.place_of_node(_seq(inner))
            if place is None or place.source is None or place.node is None or _numel(inner) == 1:
                continue
            scope = Scope(place.source, place.enclosing_function or place.source.tree or ast.Module([], []))
            spans = _declared(Spot(scope, place.node) if isinstance(place.node, ast.expr) else None, place)
            if spans or (place.line, place.file) == (culprit.line, culprit.file):
                return spans
            return [place.span(f"`{op_name(inner)}` gives one value per element here", "made")]
    return []


def _declared(spot: Spot | None, place: ResolvedSite | None) -> list[SourceSpan]:
    """Calls with `reduction="none"` around a place: in the expression itself, in its function, in its file when it is the only one."""
    if spot is None:
        return []
    source = spot.scope.source
    nearby: list[ast.AST] = [spot.node, spot.scope.tree, *([source.tree] if source.tree is not None else [])]
    for where in nearby:
        found = [call for call in inside(where, ast.Call) if _is_unreduced(call)]
        if found and (where is not source.tree or len(found) == 1):
            return [Spot(spot.scope, node).span('`reduction="none"` keeps one value per element', "declared") for node in found[:2]]
    return []


def _is_unreduced(call: ast.Call) -> bool:
    return is_constant(argument(call, "reduction"), "none") or is_constant(argument(call, "reduce"), False)


def _fixes(incident: Incident, expression: ast.expr | None, name: str | None, made: ResolvedSite | None) -> list[Fix]:
    patch, place = None, incident.place
    if made is not None and made.source is not None and isinstance(made.node, ast.expr):  # backward is called by a framework
        patch = replaced(made.source, [(made.node, f"({made.source.segment(made.node)}).mean()")])
    elif (
        expression is not None
        and place is not None
        and place.source is not None
        and isinstance(expression, (ast.Name, ast.Attribute, ast.Call))
    ):
        patch = replaced(place.source, [(expression, f"{place.source.segment(expression)}.mean()")])
    shown, weights = name or "loss", weights_argument(incident)
    ones = f"{weights}=torch.ones_like({shown})"
    return [
        Fix(
            title=f"reduce `{shown}` to one number, such as `{shown}.mean()`, before backward",
            safety="unsafe",
            patch=patch,
            detail="mean() keeps the gradient's size independent of the batch size; sum() does not.",
        ),
        Fix(
            title=f"pass the weight of each element: `{f'{shown}.backward({ones})' if weights == 'gradient' else ones}`",
            safety="unsafe",
            detail="Right where a vector-Jacobian product is wanted; ones give the gradient of the sum.",
        ),
    ]


RULE = Rule(
    code="GG401",
    name="non-scalar-root",
    summary="backward was called on a tensor with more than one element",
    recognise=recognise,
    priority=50,
    messages=("grad can be implicitly created only for scalar outputs", "grad can be implicitly created only for real scalar outputs"),
)
