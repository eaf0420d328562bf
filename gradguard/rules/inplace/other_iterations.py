"""Loops over another module's parameters: `for a, p in zip(mean.parameters(), model.parameters())` writes into `mean` by `a`.

The loop's text tells which iterable a variable comes from, the objects alive tell whose parameters that iterable gives.
"""

from __future__ import annotations

import ast
import gc
from typing import Any

from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import StateName
from gradguard.analysis.program.bindings import dotted, flatten
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.memory import iterated
from gradguard.core.safe_read import is_quiet, modules_in, name_of_class, peek
from gradguard.rules.inplace.reaching_writes import Scope, live_value

_LISTING = frozenset({"parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "values", "items"})


def over_parameters(scope: Scope, node: ast.AST | None, written: str | None) -> bool:
    """Whether the written name is a loop variable over `.parameters()` or the like."""
    for above in scope.source.ancestors(node) if node is not None else ():
        if isinstance(above, (ast.For, ast.AsyncFor)) and written in [dotted(single) for single in flatten(above.target)]:
            names = {item.attr for item in inside(above.iter, ast.Attribute)}
            return bool(names & _LISTING) or isinstance(above.iter, ast.Call)
    return False


def belongs_elsewhere(incident: Incident, scope: Scope, node: ast.AST | None, written: str | None, state: StateName) -> bool:
    """Whether a statement writes, by a loop's variable, into the parameters of modules that this parameter is none of."""
    if node is None or written is None:
        return False
    for above in scope.source.ancestors(node):
        if isinstance(above, (ast.For, ast.AsyncFor)):
            given = iterated(above, written)
            if given is not None:
                listed = _listed_of(given)
                found = [] if listed is None else _modules_called(incident, scope, listed)
                return bool(found) and not any(_holds(module, state) for module in found)
    return False


def _listed_of(given: ast.expr) -> str | None:
    """`self.mean` of `self.mean.parameters()`."""
    while isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) and given.func.attr in _LISTING:
        given = given.func.value
        if dotted(given) is not None:
            return dotted(given)
    return None


def _modules_called(incident: Incident, scope: Scope, name: str) -> list[nn.Module]:
    """Every module that the expression can stand for in that function: its variable while it runs, or an attribute of its class."""
    first, *rest = name.split(".")
    if first == "self" and scope.owner is not None:
        kind = scope.owner.name
        owners = [obj for obj in gc.get_objects() if name_of_class(type(obj)) == kind and is_quiet(obj)]
    else:
        owners = [live_value(incident, scope, first)]
    values: list[Any] = owners
    for part in rest:
        values = [peek(value, part, None) for value in values if value is not None]
    return [value for value in values if isinstance(value, nn.Module)] if all(isinstance(value, nn.Module) for value in values) else []


def _holds(module: nn.Module, state: StateName) -> bool:
    return any(child is state.owner for child in modules_in(module))
