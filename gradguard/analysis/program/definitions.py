"""The statement that gives a name its value at a place, and what of the statement's value goes to the name."""

from __future__ import annotations

import ast

from gradguard.analysis.places.source import dotted
from gradguard.analysis.program.scopes import Scope
from gradguard.analysis.program.syntax import FUNCTIONS

ANY = -1  # in a path: "some element of it"
Path = tuple[int | str, ...]
"""Which part of a value: items by number, or by key; of an object, its attribute by name."""


def bound_value(statement: ast.stmt, name: str) -> tuple[ast.expr, Path] | None:
    """The expression whose value (or the item of it that the path names) a statement binds to `name`."""
    if isinstance(statement, (ast.For, ast.AsyncFor)):
        path = _path_in(statement.target, name)
        return None if path is None else (statement.iter, (ANY, *path))
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        for item in statement.items:
            if item.optional_vars is not None and _path_in(item.optional_vars, name) is not None:
                return item.context_expr, ()
        return None
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            path = _path_in(target, name)
            if path is not None:
                return statement.value, path
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        return statement.value, ()
    for node in ast.walk(statement):
        if isinstance(node, ast.NamedExpr) and node.target.id == name:
            return node.value, ()
    return None


def _path_in(target: ast.expr, name: str) -> Path | None:
    if dotted(target) == name:
        return ()
    if isinstance(target, (ast.Tuple, ast.List)):
        for i, element in enumerate(target.elts):
            if isinstance(element, ast.Starred):
                return (ANY,) if dotted(element.value) == name else None
            inner = _path_in(element, name)
            if inner is not None:
                return (i, *inner)
    return None


def returns_of(scope: Scope) -> list[ast.expr]:
    """What a function returns (or yields), in source order."""
    if isinstance(scope.tree, ast.Lambda):
        return [scope.tree.body]
    found = []
    stack: list[ast.AST] = list(getattr(scope.tree, "body", []))
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)) and node.value is not None:
            found.append(node.value)
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            stack.extend(ast.iter_child_nodes(node))
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))
