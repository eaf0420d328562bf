"""Modules that were to be put into a frozen model, and of which it has none: the condition was never true. Part of GG303."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.sites import short, site_at
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.blocks import conditions_of
from gradguard.analysis.program.expressions import calls_inside, inside
from gradguard.analysis.program.syntax import Source
from gradguard.core.safe_read import modules_in


class Missing(NamedTuple):
    """The statement that puts a module in, the class, and the condition it stands under."""

    place: ResolvedSite
    kind: str
    condition: str


def after(incident: Incident, freeze: ResolvedSite, modules: list[nn.Module]) -> Missing | None:
    """Below the freeze, in its function: the one conditional statement that puts in what the model has nowhere."""
    source, function = freeze.source, freeze.enclosing_function
    if source is None or function is None:
        return None
    names = next((view.globals for view in incident.user_frames if view.frame.f_code.co_filename == source.filename), {})
    found = []
    for statement, value in _put_in(source, function):
        kind = names.get(value.func.id) if isinstance(value.func, ast.Name) else None
        condition = next((each.test for each in conditions_of(source, statement) if each.holds), None)
        if statement.lineno < freeze.line or condition is None or not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            continue
        if not any(isinstance(part, kind) for module in modules for part in modules_in(module)):
            found.append(Missing(site_at(source, statement), kind.__name__, short(source.flat(condition), 60)))
    return found[0] if len(found) == 1 else None


def _put_in(source: Source, function: ast.AST) -> Iterator[tuple[ast.stmt, ast.Call]]:
    """`setattr(parent, name, Part(...))` and `parent[name] = Part(...)`, with the call that makes the part."""
    for call in calls_inside(function, "setattr"):
        statement = source.statement(call)
        if statement is not None and len(call.args) == 3 and isinstance(call.args[2], ast.Call):
            yield statement, call.args[2]
    for node in inside(function, ast.Assign):
        if isinstance(node.value, ast.Call) and any(isinstance(target, (ast.Subscript, ast.Attribute)) for target in node.targets):
            yield node, node.value
