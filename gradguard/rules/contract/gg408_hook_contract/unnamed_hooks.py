"""Hooks that have no name of their own: objects with a `__call__`, and functions with some arguments given beforehand (`partial`)."""

from __future__ import annotations

import ast

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import assignments_to, dotted
from gradguard.analysis.program.call_search import called_name
from gradguard.analysis.program.provenance import Spot
from gradguard.analysis.program.scopes import Scope
from gradguard.analysis.program.syntax import Source

UNNAMED = "<unknown>"  # what PyTorch calls them


def functions_given(incident: Incident, spot: Spot) -> list[Scope]:
    """The functions behind a hook that a registration call is given in this way."""
    call = spot.node
    given = next(iter([*call.args[:1], *(k.value for k in call.keywords if k.arg == "hook")]), None) if isinstance(call, ast.Call) else None
    if given is None:
        return []
    source = spot.scope.source
    if isinstance(given, ast.Name) and given.id == "self":
        around = next((above for above in source.ancestors(given) if isinstance(above, ast.ClassDef)), None)
        return [] if around is None else _called(source, around)
    name = dotted(given)
    values: list[ast.expr] = [given]
    if name is not None and source.tree is not None:
        values = [value for statement in assignments_to(source.tree, name) if (value := getattr(statement, "value", None)) is not None]
    return [scope for value in values if isinstance(value, ast.Call) for scope in _made(incident, value)]


def _made(incident: Incident, call: ast.Call) -> list[Scope]:
    """What runs where the result of this call is called."""
    if called_name(call) == "partial":
        inner = dotted(call.args[0]) if call.args else None
        if inner is None:
            return []
        wanted = inner.rpartition(".")[2]
        return [
            Scope(source, node)
            for source in incident.sources
            for node in source.scopes
            if isinstance(node, ast.FunctionDef) and node.name == wanted
        ]
    return [
        scope
        for source in incident.sources
        for node in source.scopes
        if isinstance(node, ast.ClassDef) and node.name == called_name(call)
        for scope in _called(source, node)
    ]


def _called(source: Source, kind: ast.ClassDef) -> list[Scope]:
    return [Scope(source, node) for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "__call__"]
