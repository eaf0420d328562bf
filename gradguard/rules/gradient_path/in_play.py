"""The optimizer that a failed backward was to serve, and whether everything that it holds is frozen."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradguard.analysis.history import loss_expressions
from gradguard.analysis.history.follower import Follower
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.optimizer_contents import parameters_of
from gradguard.analysis.places.source import resolve
from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.blocks import function_around
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.search_scopes import Scope, evaluate
from gradguard.core.safe_read import UNKNOWN, modules_in, parameters_in

_CALLERS = 4


@dataclass(frozen=True)
class AllFrozen:
    """An optimizer of which no parameter requires grad, and the modules of these parameters that the root was computed by.

    Attributes:
        optimizer: what it is called.
        detached: whether something else was cut off on the way to the root.
    """

    optimizer: str
    parameters: list[torch.Tensor]
    modules: list[nn.Module]
    detached: bool


def all_frozen(incident: Incident, detached: bool) -> AllFrozen | None:
    """The optimizer in play, if it has nothing to train and its parameters stand on the way to the root: then no cut is to blame."""
    found = stepped_next(incident)
    parameters = [] if found is None else parameters_of(found[1])
    if found is None or not parameters or any(parameter.requires_grad for parameter in parameters):
        return None
    held = {id(parameter) for parameter in parameters}
    followed = loss_expressions.flow_of_root(incident)
    modules = [
        each
        for each in (() if followed is None else followed[0].modules)
        if any(id(p) in held for p in parameters_in(each)) and not any(p.requires_grad for p in parameters_in(each))
    ]
    inner = {id(child) for module in modules for child in modules_in(module) if child is not module}
    modules = [module for module in modules if id(module) not in inner]
    return AllFrozen(found[0], parameters, modules, detached) if modules else None


def stepped_next(incident: Incident) -> tuple[str, Any] | None:
    """The optimizer whose step comes next behind the failed call, with its name there: in its function, or in the one that called it."""
    follower = Follower(incident)
    for level in range(_CALLERS):
        scope = follower.live(level)
        place = None if scope is None or scope.view is None else resolve(scope.view.site)
        if scope is None or place is None or place.call is None:
            return None
        for call in _methods_called(scope, place.call):
            if call.attr in ("backward", "manual_backward"):
                return None
            found = _stepped(call, scope) if call.attr == "step" else None
            if found is not None:
                return found
    return None


def _methods_called(scope: Scope, behind: ast.Call) -> Iterator[ast.Attribute]:
    """The methods that a function calls behind one of its calls, in source order."""
    end = (behind.end_lineno or behind.lineno, behind.end_col_offset or 0)
    found: list[ast.Attribute] = []
    for node in inside(scope.function, ast.Call):
        if isinstance(node.func, ast.Attribute) and (node.lineno, node.col_offset) >= end:
            own = function_around(scope.source, node)
            if own is scope.function or (own is None and isinstance(scope.function, ast.Module)):
                found.append(node.func)
    yield from sorted(found, key=lambda node: (node.lineno, node.end_col_offset or 0))


def _stepped(method: ast.Attribute, scope: Scope) -> tuple[str, Any] | None:
    """Of `optimizer.step()`, or of `scaler.step(optimizer)`, the optimizer."""
    call = scope.source.parents.get(method)
    for node in (method.value, *(call.args[:1] if isinstance(call, ast.Call) else ())):
        value, name = evaluate(node, scope), dotted(node)
        if value is not UNKNOWN and name is not None and parameters_of(value):
            return name, value
    return None
