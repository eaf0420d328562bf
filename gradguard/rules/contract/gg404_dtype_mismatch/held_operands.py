"""The odd operand that is no argument of the failing call: a tensor that the called module was given when it was made, such as the
class weights of a loss."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, assignments_to, dotted
from gradguard.analysis.program.call_search import called_name
from gradguard.analysis.program.definitions import bound_value
from gradguard.analysis.program.provenance import Judge, Maker, Spot, stores_of, trace
from gradguard.analysis.program.scopes import Scope, frame_scopes
from gradguard.analysis.program.syntax import FUNCTIONS
from gradguard.core.safe_read import own_dict
from gradguard.rules.contract.operands import Operand


def held_operand(incident: Incident, place: ResolvedSite, scope: Scope, judge: Judge, maker: Maker) -> Operand | None:
    """The one buffer that `judge` says yes to, of those that the module's constructor was given; traced from there."""
    call = place.call
    module = None if call is None else scope.evaluate(call.func)
    if call is None or not isinstance(module, nn.Module):
        return None
    odd = [(name, value) for name, value in module._buffers.items() if value is not None and judge(value)]
    if len(odd) != 1:
        return None
    name, value = odd[0]
    makers = [
        spot for spot in _made(scope, call.func) if isinstance(spot.node, ast.Call) and called_name(spot.node) == type(module).__name__
    ]
    given = _given(type(module), makers[0].node, name) if len(makers) == 1 else None
    if given is None:
        return None
    inner = _entered(incident, scope, call.func, makers[0].scope)
    return Operand(given, inner, trace(inner, given, judge, maker), f"{dotted(call.func)}.{name}", value)


def _made(scope: Scope, called: ast.expr) -> list[Spot]:
    """Where the called module was made, as far as the source of its owner, of the function or of the file tells."""
    if isinstance(called, ast.Attribute):
        owner = scope.evaluate(called.value)
        return stores_of(owner, called.attr) if own_dict(owner) is not None else []
    if not isinstance(called, ast.Name) or scope.source.tree is None:
        return []
    around = scope if assignments_to(scope.tree, called.id) else Scope(scope.source, scope.source.tree, scope.globals, scope.globals)
    found = [bound_value(statement, called.id) for statement in assignments_to(around.tree, called.id)]
    return [Spot(around, bound[0], called.id) for bound in found if bound is not None]


def _given(kind: type, call: ast.expr | ast.stmt, name: str) -> ast.expr | None:
    """What a constructor's call gives as this argument."""
    if not isinstance(call, ast.Call):
        return None
    by_name = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    if by_name is not None or any(isinstance(argument, ast.Starred) for argument in call.args):
        return by_name
    try:
        names = list(inspect.signature(kind).parameters)
    except (TypeError, ValueError):
        return None
    return call.args[names.index(name)] if name in names and names.index(name) < len(call.args) else None


def _entered(incident: Incident, scope: Scope, called: ast.expr, inner: Scope) -> Scope:
    """The constructor's scope with the one call of its class that the user's files have."""
    owner: Any = scope.evaluate(called.value) if isinstance(called, ast.Attribute) else None
    if inner.caller is not None or inner.function is None or inner.function.name != "__init__" or isinstance(owner, torch.Tensor):
        return inner
    calls = [
        (source, node)
        for source in incident.sources
        for node in ast.walk(source.tree or ast.Module([], []))
        if isinstance(node, ast.Call) and called_name(node) == type(owner).__name__
    ]
    if len(calls) != 1:
        return inner
    source, node = calls[0]
    around = next((above for above in source.ancestors(node) if isinstance(above, FUNCTIONS)), source.tree)
    scopes = frame_scopes(incident.frames)
    live = next((each for each in scopes if each.tree is around), None)
    names = next((each.globals for each in scopes if each.source.filename == source.filename), {})
    outer = live or Scope(source, around or ast.Module([], []), {}, names)
    return Scope(inner.source, inner.tree, inner.values, inner.globals, (outer, node))
