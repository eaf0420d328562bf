"""# GG404 dtype-mismatch

## What it is
An operation was given tensors of dtypes that do not go together: targets in float64 (from numpy) or in integers for a loss
that computes in float32, class indices in floats, a float64 input for a float32 layer.

## Why it is wrong
Most kernels, and most backward formulas, work in one dtype. NumPy computes in float64, PyTorch's layers in float32, class
indices are int64; nothing converts between them silently.

## Example
    targets = torch.from_numpy(np.linspace(0, 1, 16))
    loss = F.huber_loss(model(x), targets)
    loss.backward()

## Use instead
    targets = torch.from_numpy(np.linspace(0, 1, 16)).float()

## Fix safety
Unsafe: values are rounded to the new dtype.

## When it speaks, what silences it
When PyTorch refuses the dtypes, in forward or in backward. The culprit is the line that made the odd tensor; the call that
met it where the tensor's origin is not known; of a model all in one dtype, the call that handed the tensor to the model.
"""

from __future__ import annotations

import ast
import re
from typing import Any, TypeGuard

import torch
from torch import nn

from gradguard.analysis.graph.walk import op_name, walk
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.call_search import calls_in_use
from gradguard.analysis.program.expressions import argument, closed, last_part
from gradguard.analysis.program.provenance import Judge, Maker, Spot
from gradguard.analysis.program.scopes import Scope
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan, TensorFacts
from gradguard.core.safe_read import named_modules
from gradguard.fixes.edits import replaced, with_argument
from gradguard.rules import wording
from gradguard.rules.base import Rule
from gradguard.rules.contract.gg404_dtype_mismatch import float_wanted
from gradguard.rules.contract.gg404_dtype_mismatch.dtypes import (
    CONVERTERS,
    FLOATS,
    INTEGERS,
    dtype_judge,
    dtype_maker,
    dtype_named,
    dtypes_in,
)
from gradguard.rules.contract.gg404_dtype_mismatch.held_operands import held_operand
from gradguard.rules.contract.gg404_dtype_mismatch.index_roles import index_operand, wants_integers
from gradguard.rules.contract.gg404_dtype_mismatch.promoted import Entered, entered
from gradguard.rules.contract.operands import Operand, model_gate, odd_operand, scope_at, tensors_at_hand, way_spans
from gradguard.rules.contract.wording import untraced_note
from gradguard.torch_compat.private_api import saved_data, saved_slots

Dtypes = frozenset[torch.dtype]

_ONE = (  # (pattern with the wrong dtype as its first group, expected dtype or group 2)
    (re.compile(r"[Ff]ound dtype (\w+) but expected (\w+)"), None),
    (re.compile(r"result type \w+ can't be cast to the desired output type (\w+)"), torch.float32),
    (re.compile(r"expected target dtype to be Long or Byte, but got (\w+)"), torch.int64),
    (re.compile(r"target with class probabilities, got (\w+)"), torch.float32),
    (re.compile(r"following scalar types: Long, Int; but got torch\.(?:cuda\.)?(\w+)Tensor"), torch.int64),
    (re.compile(r"could not infer output dtype.*?Got: (\w+)"), torch.float32),
    (re.compile(r"floating point or complex tensor as input\. Got (\w+)"), torch.float32),
    (re.compile(r"boolean tensor, but got a tensor with dtype (\w+)"), torch.bool),
    (re.compile(r"boolean masks, but got mask with dtype (\w+)"), torch.bool),
)
_KERNEL = re.compile(r"not implemented for '(\w+)'")

_FACTORIES = {"arange", "empty", "full", "full_like", "ones", "ones_like", "tensor", "zeros", "zeros_like"}


def recognise(incident: Incident) -> Diagnosis | None:
    message = incident.message
    if "cuda" in message.lower() and "should be the same" in message:
        return None  # devices
    if incident.says("assign a gradient with dtype"):
        return float_wanted.assigned(incident)
    told = float_wanted.whole_numbers(incident) if incident.says("only tensors of floating point") else float_wanted.drawn(incident)
    told = told or float_wanted.whole_scores(incident)
    if told is not None:
        return told
    wrong, expected = _read(incident)
    floats = wants_integers(incident)
    if floats is not None:  # "expected scalar type Long but found Float" and the like name both, and not which argument is at fault
        wrong, expected = frozenset({floats.dtype}), torch.int64
    if not wrong:
        return None
    place, node_name = _failing_place(incident, wrong)
    return _told(incident, wrong, expected, place, node_name)


def _read(incident: Incident) -> tuple[Dtypes, torch.dtype | None]:
    """The dtype(s) that are wrong, and the one that was wanted."""
    message = incident.message
    for pattern, expected in _ONE:
        found = pattern.search(message)
        if found is not None:
            bad = dtype_named(found[1])
            wanted = expected if expected is not None else dtype_named(found[2])
            return (frozenset({bad}) if bad is not None else frozenset()), wanted
    kernel = _KERNEL.search(message)
    if kernel is not None:
        bad = dtype_named(kernel[1])
        if bad is None:
            return frozenset(), None
        return frozenset({bad}), torch.int64 if bad in (torch.float32, torch.float64) else torch.get_default_dtype()
    if incident.says(
        "tensors used as indices must be",
        "expected dtype int32/int64 for index",
        "expected dtype int32 or int64 for index",
        "only applicable to index tensor",
    ):
        return FLOATS | {torch.int32, torch.int16} if incident.says("only applicable") else FLOATS, torch.int64
    if incident.says("integral inputs not supported", "only tensors of floating point"):
        return INTEGERS | {torch.bool}, torch.get_default_dtype()
    if incident.says("with a bool tensor is not supported", "with two bool tensors is not supported"):
        return frozenset({torch.bool}), torch.get_default_dtype()
    return _read_pair(incident)


def _read_pair(incident: Incident) -> tuple[Dtypes, torch.dtype | None]:
    named = dtypes_in(incident.message)
    tensors = tensors_at_hand(incident)
    present = list(dict.fromkeys([*named, *(t.dtype for t in tensors if len(named) < 2)]))
    about_dtypes = bool(named) or incident.says("dtype", "datatype", "scalar type")
    pair = named if len(named) >= 2 else present if about_dtypes else []
    if len(pair) < 2:
        return frozenset(), None
    owned = [t.dtype for t in tensors if isinstance(t, nn.Parameter) and t.dtype in pair]
    default = torch.get_default_dtype()
    expected = owned[0] if owned else default if default in pair else pair[0]
    return frozenset(d for d in pair if d != expected), expected


def _failing_place(incident: Incident, wrong: Dtypes) -> tuple[ResolvedSite | None, str | None]:
    """The user's line that ran the operation: for an error out of backward the forward line of the node that failed."""
    if incident.where not in ("backward", "grad") and not (incident.where == "escape" and incident.roots):
        return incident.place, None
    for node, _ in walk(incident.root_nodes, limit=50_000):
        kinds = {data.dtype for _, slot in saved_slots(node) if (data := saved_data(slot)) is not None}
        if len(kinds) > 1 and kinds & wrong:
            name = op_name(node)
            place = incident.place_of_node(int(node._sequence_nr()))
            return place, name
    return None, None


def _told(incident: Incident, wrong: Dtypes, expected: torch.dtype | None, place: ResolvedSite | None, op: str | None) -> Diagnosis | None:
    judge, maker = dtype_judge(wrong), dtype_maker(wrong)
    operand: Operand | None = None
    held: Operand | None = None
    came: Entered | None = None
    scope: Scope | None = None
    call_span: SourceSpan | None = None
    traced = True
    callee = place.callee if place is not None else None
    if place is not None:
        scope = scope_at(incident, place)
        node = place.node or place.statement
        if scope is not None and node is not None:
            role = index_operand(incident, place, scope, judge, maker) if expected is torch.int64 else None
            operand = role or odd_operand(scope, node, judge, maker)
            held = held_operand(incident, place, scope, judge, maker) if operand is None or operand.value is None else None
            operand = held or operand
        call_span = place.span(_met(op or (last_part(place.call) if place.call is not None else None), wrong, expected))
        if wrong <= FLOATS and expected in FLOATS:
            came = _came_in(incident, wrong, operand, judge, maker)
    elif op is not None:
        camel = "".join(part.capitalize() for part in op.split("_"))
        types = {"binary_cross_entropy": ("BCELoss",), "binary_cross_entropy_with_logits": ("BCEWithLogitsLoss",)}.get(
            op, (camel, camel.replace("Smoothl1", "SmoothL1"))
        )
        traced = False
        for spot in calls_in_use(incident, op, types):
            found = odd_operand(spot.scope, spot.node, judge, maker)
            if found is not None or call_span is None:
                scope, operand, call_span = spot.scope, found, spot.span(_met(op, wrong, expected))
                callee = spot.scope.source.flat(spot.node.func) if isinstance(spot.node, ast.Call) else op
            if found is not None:
                break
    name = operand.name if operand is not None else None
    value = operand.value if operand is not None else None
    bad = _shown([value.dtype] if value is not None and value.dtype in wrong else sorted(wrong, key=str)[:1] if len(wrong) == 1 else [])
    wanted = _shown([expected]) if expected is not None else ""
    if came is not None:
        operand = came.operand
    origin = operand.origin if operand is not None else None
    shown = f"`{name}`" if name else "a tensor"
    related: list[SourceSpan] = []
    culprit = call_span.model_copy(update={"role": "culprit"}) if call_span is not None else None
    if origin is not None and operand is not None and operand.way.certain:
        called = operand.name if came is not None else name
        label = f"{f'`{called}`' if called else 'it'} is made in {bad or 'another dtype'} here"
        if not _is_made_there(operand):
            label = f"{bad or 'the dtype'} comes in here"
        made = origin.span(label, "culprit")
        if expected is torch.int64 and culprit is not None and any(isinstance(spot.node, ast.Subscript) for spot in operand.way.spots):
            # a column of a table of floats: the table is right, and so may be the dtype of its other columns
            related.append(
                made.model_copy(update={"role": "made", "label": f"what {shown} is a part of is made in {bad or 'floats'} here"})
            )
            call_span = None
        elif operand.cast is not None:
            culprit = operand.cast.span(f"the array behind {shown} is cast to floats here", "culprit")
            related.append(made.model_copy(update={"role": "made"}))
        else:
            culprit = made
        related += way_spans(operand, f"still in {bad}" if bad else "handed on")
        if came is not None:
            related.append(came.place.span(f"the result is in {bad} too" if bad else "the result has it too", "carried"))
        if call_span is not None:
            related.append(call_span)
    elif came is not None and call_span is not None:
        culprit = came.place.span(f"`{came.operand.name}` is {bad}, and so is the result" if came.operand.name else f"{bad} comes in here")
        related.append(call_span)
    elif held is not None and call_span is not None:
        culprit = Spot(held.scope, held.expression).span(f"{bad or 'another dtype'} goes into the module here", "culprit")
        related.append(call_span)
    gate = model_gate(operand, expected) if operand is not None and came is None and not operand.way.certain else None
    if gate is not None and call_span is not None:
        culprit = Spot(gate.scope, gate.expression).span(
            f"goes in as {bad or 'another dtype'}, and all of that module is {wanted}", "culprit"
        )
        related.append(call_span)
    if incident.place is not None and incident.where in ("backward", "grad"):
        related.append(incident.place.span("backward noticed here", "backward"))
    doing = f"`{callee}`" if callee else f"`{op}`" if op else "the operation"
    subject = f"{shown[0].upper()}{shown[1:]}" if not name else shown
    headline = f"{subject} is {bad or 'of another dtype'}, but {doing} needs {wanted or 'one dtype for all its tensors'}."
    return Diagnosis(
        code="GG404",
        name="dtype-mismatch",
        headline=headline,
        culprit=culprit,
        related=related,
        tensors=[TensorFacts(name=name, shape=list(value.shape) if value is not None and not value.is_nested else None, dtype=bad or None)]
        if name
        else [],
        explanation=_why(wrong, expected, op),
        notes=[
            *(_called_elsewhere(name, gate or operand) if came is None and (operand is None or _is_made_there(operand)) else []),
            *_module_note(incident, place, scope),
            *([] if traced or culprit is None else [untraced_note(f"the call of `{op}`")]),
        ],
        fixes=_fixes(
            gate or operand, gate.name if gate is not None else name if came is None else came.operand.name, wrong, expected, scope
        ),
        confidence="certain" if operand is not None and traced else "likely",
    )


def _came_in(incident: Incident, wrong: Dtypes, operand: Operand | None, judge: Judge, maker: Maker) -> Entered | None:
    """Where the tensor that an operation refused, or one that a module of torch's refused inside, came by its dtype."""
    value = None if operand is None else operand.value
    if operand is None:
        value = next((each for each in tensors_at_hand(incident) if judge(each) and each.grad_fn is not None), None)
    return None if value is None else entered(incident, value, wrong, judge, maker)


def _called_elsewhere(name: str | None, operand: Operand | None) -> list[str]:
    """What the tensor is called where it comes from, if not so."""
    if name is None or operand is None:
        return []
    names = [*([operand.name] if operand.name else []), *operand.way.names]
    outer = [other for other in names if other != name and other.isidentifier()]
    return [f"`{name}` is `{outer[-1]}` where it comes from"] if outer else []


def _module_note(incident: Incident, place: ResolvedSite | None, scope: Scope | None) -> list[str]:
    """Where the module that refused the tensor sits in the whole model, unless the call says so."""
    if place is None or place.call is None or scope is None or place.callee is None:
        return []
    module = scope.evaluate(place.call.func)
    roots = [root for _, root in incident.names.modules] if isinstance(module, nn.Module) else []
    paths = [(path, root) for root in roots for path, child in named_modules(root) if child is module and path]
    path, root = max(paths, key=lambda found: found[0].count("."), default=("", None))
    return [f"`{place.callee}` is `{path}` of the `{type(root).__name__}`"] if "." in path else []


def _is_made_there(operand: Operand) -> bool:
    """Whether what is made at the origin is the operand itself, handed on by name only."""
    return all(isinstance(spot.node, (ast.Name, ast.Attribute, ast.Tuple)) for spot in operand.way.spots[:-1])


def _converts(node: ast.expr) -> TypeGuard[ast.Call]:
    """`x.float()`: the conversion that another one takes the place of."""
    return isinstance(node, ast.Call) and not node.args and last_part(node) in (*CONVERTERS.values(), "to")


def _shown(dtypes: list[Any]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def _met(op: str | None, wrong: Dtypes, expected: torch.dtype | None) -> str:
    bad = _shown(sorted(wrong, key=str)) if len(wrong) == 1 else "the wrong dtype"
    return f"{f'`{op}`' if op else 'this'} meets {bad}" + (f", and needs {_shown([expected])}" if expected is not None else "")


def _why(wrong: Dtypes, expected: torch.dtype | None, op: str | None) -> str:
    if expected is torch.int64:
        return (
            "Class indices and indices into tensors are integers (int64). Floats are not taken for them anywhere; a loss takes "
            "float targets only as class probabilities, in the shape of the input."
        )
    if torch.float64 in wrong:
        return "NumPy computes in float64 and `torch.from_numpy` keeps that, while layers and losses compute in float32. " + (
            "The forward of this loss promoted silently; its backward formula does not."
            if op
            else "This operation does not convert between them."
        )
    if wrong & INTEGERS or torch.bool in wrong:
        return (
            "Integer tensors cannot carry fractions or gradients, so a loss between numbers needs floating-point targets; "
            "`torch.full`, `torch.tensor` and comparisons of integers make integer or bool tensors."
        )
    return "The operation computes in one dtype and converts nothing by itself."


def _fixes(operand: Operand | None, name: str | None, wrong: Dtypes, expected: torch.dtype | None, scope: Scope | None) -> list[Fix]:
    method = CONVERTERS.get(expected) if expected is not None else None
    shown = name or "the tensor"
    if method is None:
        return [Fix(title=f"convert {shown if not name else f'`{name}`'} to the dtype of the others", safety="unsafe")]
    patch = None
    itself = operand is not None and _is_made_there(operand)
    floats = wrong <= FLOATS and expected in FLOATS  # an integer that floats are computed from may be an index elsewhere
    origin = operand.origin if operand is not None and operand.way.certain and (itself or floats) else None
    if origin is not None and isinstance(origin.node, ast.expr):
        source, made = origin.scope.source, origin.node
        written = argument(made, "dtype") if isinstance(made, ast.Call) else None
        receiver = made.func.value if _converts(made) and isinstance(made.func, ast.Attribute) else made
        change = (made, f"{closed(source, receiver)}.{method}()") if written is None else (written, str(expected))
        patch = replaced(source, [change])
        if not itself:
            how = change[1] if written is None else f"dtype={expected}"
            return [Fix(title=f"make it in {_shown([expected])}: `{wording.short(how, 60)}`", safety="unsafe", patch=patch)]
    elif operand is not None and isinstance(operand.expression, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) and scope is not None:
        patch = replaced(operand.scope.source, [(operand.expression, f"{operand.scope.source.segment(operand.expression)}.{method}()")])
    where = "where it is made" if origin is not None else "in the call"
    if origin is None and operand is not None:
        name, shown = name or "tensor", operand.scope.source.flat(operand.expression)
    at_its_making = _made_right(operand, expected) if origin is None and operand is not None and expected is not None else None
    return [
        Fix(
            title=f"convert it {where}: `{shown if name else 'tensor'}.{method}()`, or make it with `dtype={expected}`",
            safety="unsafe",
            patch=patch,
        ),
        *([at_its_making] if at_its_making is not None else []),
    ]


def _made_right(operand: Operand, expected: torch.dtype) -> Fix | None:
    """The dtype as an argument of the call that makes what the operand comes from, for all that is made of it."""
    made = operand.way.origin if operand.way.certain else None
    call = None if made is None else made.node
    if made is None or not isinstance(call, ast.Call) or any(keyword.arg in ("dtype", None) for keyword in call.keywords):
        return None
    if made.scope.source.flat(call.func).rpartition(".")[2] not in _FACTORIES:
        return None
    patch = with_argument(made.scope.source, call, f"dtype={expected}")
    return None if patch is None else Fix(title=f"Make it with `dtype={expected}`", safety="unsafe", patch=patch)


RULE = Rule(
    code="GG404",
    name="dtype-mismatch",
    summary="an operation met tensors of dtypes that do not go together",
    recognise=recognise,
    priority=40,
    messages=(
        "found dtype",
        "can't be cast to the desired output type",
        "expected target dtype",
        "target with class probabilities",
        "have the same dtype",
        "have same dtype",
        "expected scalar type",
        "should be the same",
        "not implemented for '",
        "must have the same dtype",
        "does not match weight dtype",
        "are not the same dtype",
        "mixed dtype",
        "destination dtypes match",
        "expected self.dtype to be equal",
        "following scalar types",
        "tensors used as indices must be",
        "expected dtype int32/int64 for index",
        "expected dtype int32 or int64 for index",
        "integral inputs not supported",
        "could not infer output dtype",
        "only tensors of floating point",
        "only applicable to index tensor",
        "same scalar type",
        "floating point or complex tensor as input",
        "but got dtype",
        "boolean tensor, but got",
        "boolean masks, but got",
        "with a bool tensor is not supported",
        "with two bool tensors is not supported",
        "assign a gradient with dtype",
    ),
)
