"""The statement that gives a name its value at a place, and what of the statement's value goes to the name."""

from __future__ import annotations

import ast

from gradguard.analysis.places.source import assignments_to, dotted
from gradguard.analysis.program.scopes import Scope
from gradguard.analysis.program.syntax import FUNCTIONS

ANY = -1  # in a path: "some element of it"
Path = tuple[int | str, ...]
"""Which part of a value: items by number, or by key; of an object, its attribute by name."""


def definition(scope: Scope, name: str, at: ast.AST) -> ast.stmt | None:
    """The statement that most likely gave `name` the value it has at `at`: the last one before it, else the loop's last."""
    use = scope.source.statement(at)
    found = assignments_to(scope.tree, name)
    if use is None:
        return found[-1] if found else None
    around = list(scope.source.ancestors(use))
    before = [s for s in found if (s in around and s is not use) or _ends_before(s, use)]
    before = [s for s in before if not _other_branch(scope, s, use)]
    if before:
        return before[-1]
    if use in found and isinstance(use, (ast.For, ast.AsyncFor, ast.With)):
        return use
    loops = [above for above in around if isinstance(above, (ast.For, ast.While))]
    inside = [s for s in found if s is not use and any(loop in scope.source.ancestors(s) for loop in loops)]
    return inside[-1] if inside else None


def _ends_before(statement: ast.stmt, use: ast.stmt) -> bool:
    if isinstance(statement, (ast.For, ast.AsyncFor, ast.With)):
        return statement.lineno < use.lineno
    return (statement.end_lineno or statement.lineno, statement.end_col_offset or 0) <= (use.lineno, use.col_offset)


def _other_branch(scope: Scope, statement: ast.stmt, use: ast.stmt) -> bool:
    chain, mine = [statement, *scope.source.ancestors(statement)], [use, *scope.source.ancestors(use)]
    for above in chain:
        if isinstance(above, ast.If) and above in mine:
            for one, other in ((above.body, above.orelse), (above.orelse, above.body)):
                if any(part in chain for part in one) and any(part in mine for part in other):
                    return True
    return False


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
