"""A `.grad` that is None was used: which tensor's. Shared by GG307 and GG309."""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.frames import FrameView
from gradguard.analysis.places.sites import site_at
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.search_scopes import Scope, definitions, evaluate
from gradguard.analysis.program.syntax import load
from gradguard.core.safe_read import UNKNOWN


@dataclass
class Missing:
    """`text`.grad is None where `place` used it."""

    tensor: torch.Tensor
    text: str
    place: ResolvedSite
    view: FrameView
    scope: Scope | None


def missing(incident: Incident) -> Missing | None:
    """The tensor whose absent `.grad` the failing line used; None if the exception is about anything else."""
    memo = incident.__dict__
    if "_missing_grad" not in memo:
        memo["_missing_grad"] = (
            _find(incident) if isinstance(incident.error, (TypeError, AttributeError)) and "NoneType" in incident.message else None
        )
    found: Missing | None = memo["_missing_grad"]
    return found


def _find(incident: Incident) -> Missing | None:
    if not incident.user_frames:
        return None
    view = incident.user_frames[0]
    place = resolve(view.site)
    source = load(view.site.code.co_filename)
    if place is None or source is None or place.statement is None:
        return None
    from gradguard.analysis.history.follower import Follower

    scope = Follower(incident).live(0)
    if scope is None:
        return None
    whole: ast.AST = (
        place.statement if not isinstance(place.statement, (ast.For, ast.With, ast.If, ast.While)) else place.node or place.statement
    )
    for part in ([place.node] if place.node is not None else []) + [whole]:
        for node in inside(part, ast.Attribute):
            found = _grad_of(node, scope, view, source)
            if found is not None:
                return found
    # a variable that was given the .grad before: `g = x.grad` and then `g.sign()`
    for name in inside(place.node or whole, ast.Name):
        if evaluate(name, scope) is None:
            for definition in definitions(scope, name.id, name)[:2]:
                for inner in inside(definition.value, ast.Attribute):
                    found = _grad_of(inner, scope, view, source)
                    if found is not None:
                        return found
    return None


def _grad_of(node: ast.Attribute, scope: Scope, view: FrameView, source: Any) -> Missing | None:
    if node.attr != "grad":
        return None
    value = tensor_of(node.value, scope)
    if not isinstance(value, torch.Tensor) or _grad(value) is not None:
        return None
    return Missing(value, source.flat(node.value), site_at(source, _used(source, node)), view, scope)


def _used(source: Any, node: ast.AST) -> ast.AST:
    """`x.grad.sign()` of `x.grad`."""
    above = source.parents.get(node)
    if isinstance(above, ast.Attribute):
        further = source.parents.get(above)
        return further if isinstance(further, ast.Call) and further.func is above else above
    return node


def tensor_of(node: ast.AST, scope: Scope) -> Any:
    """The tensor an expression means: a variable, an attribute, an item, through `.data`."""
    if isinstance(node, ast.Attribute) and node.attr == "data":
        return tensor_of(node.value, scope)
    value = evaluate(node, scope)
    return value if value is not UNKNOWN else None


def _grad(tensor: torch.Tensor) -> torch.Tensor | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tensor.grad
