"""Which argument of a torch function holds class numbers or indices: where integers are wanted that one is at fault."""

from __future__ import annotations

import ast
from typing import Any

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.expressions import argument, inside, last_part
from gradguard.analysis.program.index import only, program_of
from gradguard.analysis.program.provenance import Judge, Maker, Spot, trace
from gradguard.analysis.program.scopes import Scope
from gradguard.rules.contract.gg404_dtype_mismatch.dtypes import FLOATS, written_dtype
from gradguard.rules.contract.operands import Operand, named

# function -> (position among the arguments, a tensor that the function is a method of included; name)
_ROLES: dict[str, tuple[int, str]] = {
    **dict.fromkeys(("cross_entropy", "nll_loss", "nll_loss2d", "multi_margin_loss", "multilabel_margin_loss"), (1, "target")),
    **dict.fromkeys(("embedding", "embedding_bag"), (0, "input")),
    "one_hot": (0, "tensor"),
    **dict.fromkeys(
        ("gather", "index_select", "index_add", "index_copy", "index_fill", "scatter", "scatter_add", "scatter_reduce"), (2, "index")
    ),
    **dict.fromkeys(("take", "index_put"), (1, "index")),
    "take_along_dim": (1, "indices"),
    **dict.fromkeys(("__getitem__", "__setitem__"), (1, "")),
}
_INNER = ("cross_entropy", "nll_loss", "multi_margin_loss", "multilabel_margin_loss", "embedding", "embedding_bag")


def role_of(incident: Incident) -> tuple[str, Any] | None:
    """The failing function and the argument of it that is to be integers; None where the function is none of these."""
    name = str(getattr(incident.func, "__name__", "")) if incident.func is not None else ""
    name = name if name in _ROLES else name.removesuffix("_")
    if name in _ROLES:
        position, word = _ROLES[name]
        if word in incident.kwargs:
            return name, incident.kwargs[word]
        return (name, incident.args[position]) if position < len(incident.args) else None
    for view in incident.all_frames:  # an error that was not seen as it came up: torch's own frames have the arguments
        if view.is_user:
            return None
        if view.code_name in _INNER and _ROLES[view.code_name][1] in view.locals:
            return view.code_name, view.locals[_ROLES[view.code_name][1]]
    return None


def wants_integers(incident: Incident) -> torch.Tensor | None:
    """The class numbers or indices that came as floats."""
    role = role_of(incident)
    values = () if role is None else role[1] if isinstance(role[1], (tuple, list)) else (role[1],)
    return next((value for value in values if isinstance(value, torch.Tensor) and value.dtype in FLOATS), None)


def index_operand(incident: Incident, place: ResolvedSite, scope: Scope, judge: Judge, maker: Maker) -> Operand | None:
    """The expression that stands for that argument in the user's call, with the way back to where it became what it is."""
    role = role_of(incident)
    expression = None if role is None else _written(role[0], place, scope)
    if role is None or expression is None:
        return None
    value = scope.evaluate(expression)
    if isinstance(value, torch.Tensor) and value is not role[1]:
        return None
    way = trace(scope, expression, judge, maker)
    cast = _cast_in_numpy(way.origin) if way.certain and way.origin is not None else None
    tensor = role[1] if isinstance(role[1], torch.Tensor) else None
    return Operand(expression, scope, way, named(scope, expression, way), tensor, cast)


def _written(name: str, place: ResolvedSite, scope: Scope) -> ast.expr | None:
    position, word = _ROLES[name]
    node = place.node
    if name in ("__getitem__", "__setitem__"):
        parts = list(inside(node or place.statement, ast.Subscript))
        return parts[0].slice if len(parts) == 1 and not isinstance(parts[0].slice, (ast.Tuple, ast.Slice)) else None
    call = place.call
    if call is None or (by_name := argument(call, word)) is not None:
        return None if call is None else by_name
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    library = owner is not None and (dotted(owner) or "").partition(".")[0] in scope.source.imports
    if owner is not None and not library and call.func.attr.removesuffix("_") == name and name not in _INNER:  # type: ignore[attr-defined]
        position -= 1
        if position < 0:
            return owner
    return argument(call, word, position)


def _cast_in_numpy(spot: Spot) -> Spot | None:
    """Where the array that a tensor was made from was cast to floats, if its own line says so."""
    call = spot.node
    data = call.args[0] if isinstance(call, ast.Call) and call.args else None
    program = program_of(spot.scope.source)
    made = only(program.values(data)) if program is not None and isinstance(data, ast.Name) else None
    given = argument(made, "dtype", 0 if last_part(made) == "astype" else None) if isinstance(made, ast.Call) else None
    if given is None or not isinstance(made, ast.Call) or not isinstance(data, ast.Name):
        return None
    return Spot(spot.scope, made, data.id) if written_dtype(given, spot.scope) in FLOATS or dotted(given) == "float" else None
