"""The tensors a gradient is asked for: as written in the call, and where they were made. Shared by GG306 and GG309."""

from __future__ import annotations

import ast

import torch

from gradguard.analysis.history.cut_origins import Origin
from gradguard.analysis.history.follower import Follower
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.sites import short, site_at
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.search_scopes import Definition, Scope, definitions


def input_node(incident: Incident, index: int) -> ast.expr | None:
    """The expression of the index-th input in the autograd call."""
    place = incident.place
    call = place.call if place is not None else None
    if call is None:
        return None
    given = next((keyword.value for keyword in call.keywords if keyword.arg == "inputs"), None)
    if given is None and incident.where == "grad" and len(call.args) > 1:
        given = call.args[1]
    if given is None:
        return None
    if isinstance(given, (ast.List, ast.Tuple)):
        return given.elts[index] if index < len(given.elts) and not any(isinstance(item, ast.Starred) for item in given.elts) else None
    return given if len(incident.inputs) == 1 else None


def input_text(incident: Incident, index: int) -> str | None:
    """The same as written."""
    node = input_node(incident, index)
    place = incident.place
    return None if node is None or place is None or place.source is None else short(place.source.flat(node), 40)


def made(incident: Incident, tensor: torch.Tensor, text: str | None) -> ResolvedSite | None:
    """The statement that gave a variable its value: in the failing function, or, for its parameter, in the caller that made it."""
    if text is None:
        return None
    follower = Follower(incident)
    name: str = text
    scope = follower.live(0)
    for _ in range(6):
        if scope is None:
            return None
        place = incident.place
        use: ast.AST = ast.Name(id=name, ctx=ast.Load(), lineno=10**8, col_offset=0)
        if scope.level == 0 and place is not None and place.node is not None:
            use = place.node
        found = definitions(scope, name, use) if scope.level == 0 else _before(scope, name)
        if found:
            return (
                site_at(scope.source, found[0].statement)
                if not isinstance(found[0].statement, ast.For)
                else site_at(scope.source, found[0].value)
            )
        argument = follower.argument(name, scope)
        if argument is None:
            return None
        scope, expression = argument
        name = scope.source.flat(expression)
        if not name.isidentifier() and not name.replace(".", "").isidentifier():
            return site_at(scope.source, expression)
    return None


def made_in_a_caller(incident: Incident, tensor: torch.Tensor) -> tuple[str, ResolvedSite] | None:
    """The variable of a frame around that is this very tensor, and the statement that gave it its value there."""
    follower = Follower(incident)
    for level in range(len(follower.views)):
        scope = follower.live(level)
        if scope is None or scope.view is None:
            continue
        for name, value in scope.view.locals.items():
            found = _before(scope, name) if value is tensor and name.isidentifier() else []
            if found and not isinstance(found[0].statement, (ast.For, ast.With)):
                return name, site_at(scope.source, found[0].statement)
    return None


def sliced(place: ResolvedSite | None, name: str) -> str | None:
    """What the variable is a slice of: `xt` of `x, t = xt[:, :1], xt[:, 1:]`."""
    statement = None if place is None else place.statement
    if not isinstance(statement, ast.Assign):
        return None
    for target in statement.targets:
        values = [statement.value]
        targets = [target]
        if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple) and len(target.elts) == len(statement.value.elts):
            targets, values = list(target.elts), list(statement.value.elts)
        for single, value in zip(targets, values, strict=False):
            if dotted(single) == name and isinstance(value, ast.Subscript):
                return dotted(value.value)
    return None


def _before(scope: Scope, name: str) -> list[Definition]:
    line = scope.view.site.line if scope.view is not None else 10**8
    use = ast.Name(id=name, ctx=ast.Load(), lineno=line, col_offset=0)
    return definitions(scope, name, use)


def cuts(incident: Incident, text: str | None) -> list[Origin]:
    """Untraced: where the source says that this input lost a path it had."""
    place = incident.place
    follower = Follower(incident)
    scope = follower.live(0)
    if text is None or not text.isidentifier() or place is None or place.node is None or scope is None:
        return []
    use = next((node for node in inside(place.node, ast.Name) if node.id == text), None)
    return [origin for origin in follower.flow(use, scope).found if origin.sure] if use is not None else []
