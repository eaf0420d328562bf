"""The terms of a loss as the source writes them, and which of them have no path."""

from __future__ import annotations

import ast

from gradguard.analysis.history import loss_expressions
from gradguard.analysis.history.cut_origins import Origin
from gradguard.analysis.history.follower import Follower
from gradguard.analysis.incident import Incident
from gradguard.analysis.program.bindings import dotted, full_name
from gradguard.analysis.program.search_scopes import Scope, definitions, evaluate
from gradguard.core.safe_read import UNKNOWN

_THROUGH = frozenset({"mean", "sum", "squeeze", "float", "double", "to", "view", "reshape", "cpu", "cuda"})


def pathless(incident: Incident) -> list[Origin]:
    """Where the terms without a path of the loss that backward is called on had lost it."""
    follower = Follower(incident)
    root = loss_expressions.written_root(incident, follower)
    if root is None:
        return []
    found: list[Origin] = []
    for node, inner in _terms(follower, *root, 0):
        flow = follower.under_blocks(follower.flow(node, inner), node, inner)
        if flow.attached is False and flow.found:
            found += [origin for origin in flow.found if origin.sure]
    return found


def _terms(follower: Follower, node: ast.expr, scope: Scope, depth: int) -> list[tuple[ast.expr, Scope]]:
    """Splits sums, scalings, means and assignments; anything else is a term."""
    if depth > 12:
        return [(node, scope)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        return _terms(follower, node.left, scope, depth + 1) + _terms(follower, node.right, scope, depth + 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)):
        for scale, other in ((node.left, node.right), (node.right, node.left)):
            if _is_number(scale, scope) and (other is node.right or isinstance(node.op, ast.Mult) or scale is node.right):
                return _terms(follower, other, scope, depth + 1)
        return [(node, scope)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        return _terms(follower, node.operand, scope, depth + 1)
    if isinstance(node, ast.Name):
        found = definitions(scope, node.id, node)
        if not found:
            if scope.view is not None:
                argument = follower.argument(node.id, scope)
                if argument is not None:
                    return _terms(follower, argument[1], argument[0], depth + 1)
            return [(node, scope)]
        split: list[tuple[ast.expr, Scope]] = []
        for definition in reversed(found):
            returned = None if definition.looped else _returned(follower, definition.value, scope, definition.pick)
            if returned is not None:
                split += _terms(follower, *returned, depth + 1)
            elif definition.looped or definition.pick is not None:
                split.append((definition.value, scope) if definition.pick is None else (node, scope))
            else:
                split += _terms(follower, definition.value, scope, depth + 1)
        return split
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _THROUGH and not _is_library(node, scope):
        return _terms(follower, node.func.value, scope, depth + 1)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "sum"
        and node.args
        and isinstance(node.args[0], (ast.List, ast.Tuple))
    ):
        return [term for element in node.args[0].elts for term in _terms(follower, element, scope, depth + 1)]
    if (
        isinstance(node, ast.Call)
        and full_name(scope.source, dotted(node.func) or "") in ("torch.stack", "torch.cat")
        and node.args
        and isinstance(node.args[0], (ast.List, ast.Tuple))
    ):
        return [term for element in node.args[0].elts for term in _terms(follower, element, scope, depth + 1)]
    returned = _returned(follower, node, scope, None)
    return [(node, scope)] if returned is None else _terms(follower, *returned, depth + 1)


def _returned(follower: Follower, node: ast.expr, scope: Scope, pick: int | str | None) -> tuple[ast.expr, Scope] | None:
    """What a call of a function of the user's gives back, which may be a sum of its own."""
    return follower.returned(node, scope, pick) if isinstance(node, ast.Call) else None


def _is_library(node: ast.Call, scope: Scope) -> bool:
    return full_name(scope.source, dotted(node.func) or "").startswith(("torch.", "numpy."))


def _is_number(node: ast.expr, scope: Scope) -> bool:
    value = evaluate(node, scope)
    return value is not UNKNOWN and isinstance(value, (int, float)) and not isinstance(value, bool)
