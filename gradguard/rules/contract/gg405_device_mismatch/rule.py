"""# GG405 device-mismatch

## What it is
An operation was given tensors on different devices.

## Why it is wrong
A kernel runs on one device and reads that device's memory. Usually a tensor made inside forward or in the loop was left on
the CPU, a constant was kept as a plain attribute, which `model.to(device)` does not move, or a batch was not moved.

## Example
    self.scale = torch.ones(8)
    ...
    return x * self.scale

## Use instead
    self.register_buffer("scale", torch.ones(8))

## Fix safety
Safe: values do not change.

## When it speaks, what silences it
When PyTorch refuses the devices. The culprit is the line that made the odd tensor; the call that met it where that is not known.
"""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import dotted
from gradguard.analysis.program.expressions import argument, last_part
from gradguard.analysis.program.provenance import Judge, Maker
from gradguard.analysis.program.scopes import Scope
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan, TensorFacts
from gradguard.core.safe_read import parameters_in
from gradguard.fixes.edits import replaced
from gradguard.rules.base import Rule
from gradguard.rules.contract.gg405_device_mismatch import meta
from gradguard.rules.contract.operands import Operand, odd_operand, scope_at, tensors_at_hand, way_spans
from gradguard.torch_compat.op_schemas import factory_names

_OF_DATA = {"tensor", "as_tensor", "from_numpy", "Tensor", "FloatTensor", "LongTensor"}


def recognise(incident: Incident) -> Diagnosis | None:
    if incident.says("should be the same") and not incident.says("cuda", "mps", "xpu"):
        return None
    tensors = tensors_at_hand(incident)
    devices = list(dict.fromkeys(t.device for t in tensors))
    place = incident.place
    if place is None:
        return None
    scope = scope_at(incident, place)
    node = place.node or place.statement
    owned = [t.device for t in tensors if isinstance(t, nn.Parameter)]
    if not owned and scope is not None and isinstance(node, ast.Call):
        module = scope.evaluate(node.func)
        owned = [p.device for p in parameters_in(module)][:1] if isinstance(module, nn.Module) else []
    seen = [*devices, *owned]
    accelerated = next((d for d in seen if d.type != "cpu"), None)
    homes = {p.device for root in incident.modules for p in parameters_in(root)}
    if len({d.type for d in homes}) > 1 and any(d.type == "meta" for d in owned):
        return meta.told(incident, place, tensors)  # a part of the model was left without memory
    home = homes.pop() if len(homes) == 1 else None  # where the model is, the operands belong
    expected = owned[0] if owned else home if home in devices else accelerated
    if expected is None or scope is None or node is None:
        return None
    judge, maker = _judge(expected), _maker(expected)
    operand = odd_operand(scope, node, judge, maker)
    model_left = operand is not None and operand.value is not None and owned and expected.type == "cpu"
    name = operand.name if operand is not None else None
    value = operand.value if operand is not None else None
    bad = str(value.device) if value is not None else next((str(d) for d in devices if d != expected), "another device")
    callee = place.callee
    shown = f"`{name}`" if name else "A tensor"
    doing = f"`{callee}`" if callee else "the operation"
    origin = operand.origin if operand is not None and operand.way.certain and not model_left else None
    call_span = place.span(f"{doing} meets tensors on {bad} and on {expected}", "culprit" if origin is None else "context")
    related: list[SourceSpan] = []
    culprit = call_span
    if origin is not None and operand is not None:
        culprit = origin.span(f"{shown if name else 'it'} is made on {bad} here", "culprit")
        related = [*way_spans(operand, f"still on {bad}"), call_span]
    return Diagnosis(
        code="GG405",
        name="device-mismatch",
        headline=f"{shown} is on {bad}, but {doing} {'has its parameters' if owned else 'works'} on {expected}.",
        culprit=culprit,
        related=related,
        tensors=[TensorFacts(name=name, shape=list(value.shape) if value is not None else None, device=bad)] if name else [],
        explanation="An operation reads the memory of one device. `model.to(device)` moves parameters and buffers; it moves "
        "neither inputs nor plain tensor attributes nor what forward makes anew.",
        fixes=_fixes(operand, name, bool(model_left), expected),
        confidence="certain" if operand is not None else "likely",
    )


def _judge(expected: torch.device) -> Judge:
    def judge(value: Any) -> bool | None:
        return value.device != expected if isinstance(value, torch.Tensor) else None

    return judge


def _maker(expected: torch.device) -> Maker:
    def maker(expr: ast.expr, scope: Scope) -> bool | None:
        if not isinstance(expr, ast.Call):
            return None
        name = last_part(expr)
        given = argument(expr, "device", 0 if name == "to" else None)
        if given is not None:
            value = scope.evaluate(given)
            if isinstance(value, (str, torch.device)):
                return torch.device(value) != expected
            if isinstance(value, torch.Tensor):
                return value.device != expected
            return None
        if name in ("cpu", "numpy"):
            return expected.type != "cpu"
        if name == "cuda":
            return expected.type != "cuda"
        first = (dotted(expr.func) or "").partition(".")[0]
        if (name in factory_names() or name in _OF_DATA) and scope.source.imports.get(first, first).partition(".")[0] == "torch":
            return torch.get_default_device() != expected
        return None

    return maker


def _fixes(operand: Operand | None, name: str | None, model_left: bool, expected: torch.device) -> list[Fix]:
    if model_left:
        return [
            Fix(
                title=f"move the model to the device of its input, once, before the optimizer is made: `model.to({name or 'x'}.device)`",
                safety="safe",
            )
        ]
    origin = operand.origin if operand is not None and operand.way.certain else None
    fixes: list[Fix] = []
    statement = origin.statement if origin is not None else None
    if (
        origin is not None
        and isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Attribute)
        and isinstance(origin.node, ast.expr)
    ):
        target = statement.targets[0]
        owner = origin.scope.evaluate(target.value)
        if isinstance(owner, nn.Module) and len(statement.targets) == 1 and dotted(target.value) == "self":
            text = origin.scope.source.segment(statement.value)
            patch = replaced(origin.scope.source, [(statement, f'self.register_buffer("{target.attr}", {text})')])
            fixes.append(
                Fix(
                    title=f'make it a buffer, so that `model.to(device)` moves it: `self.register_buffer("{target.attr}", ...)`',
                    safety="safe",
                    patch=patch,
                )
            )
    fixes.append(
        Fix(
            title=f"make or move it there: `{name or 'tensor'}.to(x.device)`, or `device=x.device` where it is made",
            safety="safe",
            detail=f"The others are on {expected}.",
        )
    )
    return fixes


RULE = Rule(
    code="GG405",
    name="device-mismatch",
    summary="an operation met tensors on different devices",
    recognise=recognise,
    priority=45,
    messages=(
        "expected all tensors to be on the same device",
        "is not on the expected device",
        "are not at the same device",
        "should be the same",
        "expected object of device type",
        "different from other tensors on",
    ),
)
