"""The odd operand that is no argument of the failing call: a tensor that the called module was given when it was made, such as the
class weights of a loss."""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, dotted
from gradguard.analysis.program.blocks import function_around
from gradguard.analysis.program.expressions import last_part
from gradguard.analysis.program.index import calls_in, program_of
from gradguard.analysis.program.provenance import Judge, Maker, Spot, stores_of, trace
from gradguard.analysis.program.scopes import Scope, constructor_argument, frame_scopes
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
    makers = [spot for spot in _made(scope, call.func) if isinstance(spot.node, ast.Call) and last_part(spot.node) == type(module).__name__]
    made = makers[0].node if len(makers) == 1 else None
    given = constructor_argument(made, type(module), name) if isinstance(made, ast.Call) else None
    if given is None:
        return None
    inner = _entered(incident, scope, call.func, makers[0].scope)
    return Operand(given, inner, trace(inner, given, judge, maker), f"{dotted(call.func)}.{name}", value)


def _made(scope: Scope, called: ast.expr) -> list[Spot]:
    """Where the called module was made, as far as the source of its owner, of the function or of the file tells."""
    if isinstance(called, ast.Attribute):
        owner = scope.evaluate(called.value)
        return stores_of(owner, called.attr) if own_dict(owner) is not None else []
    program = program_of(scope.source)
    made = program.values(called) if program is not None else ()
    around = Scope(scope.source, scope.source.tree or scope.tree, scope.globals, scope.globals)
    return [
        Spot(scope if program is not None and program.source.stands_in(each, scope.tree) else around, each, dotted(called))
        for each in made
        if isinstance(each, ast.expr)
    ]


def _entered(incident: Incident, scope: Scope, called: ast.expr, inner: Scope) -> Scope:
    """The constructor's scope with the one call of its class that the user's files have."""
    owner: Any = scope.evaluate(called.value) if isinstance(called, ast.Attribute) else None
    if inner.caller is not None or inner.function is None or inner.function.name != "__init__" or isinstance(owner, torch.Tensor):
        return inner
    calls = calls_in(incident.sources, type(owner).__name__)
    if len(calls) != 1:
        return inner
    source, node = calls[0]
    around = function_around(source, node) or source.tree
    scopes = frame_scopes(incident.frames)
    live = next((each for each in scopes if each.tree is around), None)
    names = next((each.globals for each in scopes if each.source.filename == source.filename), {})
    outer = live or Scope(source, around or ast.Module([], []), {}, names)
    return Scope(inner.source, inner.tree, inner.values, inner.globals, (outer, node))
