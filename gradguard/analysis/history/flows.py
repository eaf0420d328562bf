"""What is known of a followed value, and small questions to the syntax that following asks."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import NamedTuple

from gradguard.analysis.history.cut_origins import Origin
from gradguard.analysis.program.bindings import targets_of
from gradguard.analysis.program.search_scopes import Scope
from gradguard.analysis.program.syntax import FUNCTIONS


class Flow(NamedTuple):
    """What is known of an expression's value: where it lost paths, whether it (still) has one, from which leaves."""

    found: tuple[Origin, ...] = ()
    attached: bool | None = False
    leaves: frozenset[int] = frozenset()


NOTHING = Flow()


def join(flows: Iterable[Flow]) -> Flow:
    """Values that go into one result."""
    found: list[Origin] = []
    attached: bool | None = False
    leaves: frozenset[int] = frozenset()
    for flow in flows:
        found += flow.found
        leaves |= flow.leaves
        attached = True if flow.attached or attached else None if flow.attached is None or attached is None else False
    return Flow(tuple(found), attached, leaves)


def rebinds(scope: Scope, node: ast.Name) -> bool:
    statement = scope.source.statement(node)
    return isinstance(statement, (ast.Assign, ast.AnnAssign)) and any(
        isinstance(target, ast.Name) and target.id == node.id for target in targets_of(statement)
    )


def asks_for_grad(node: ast.Call) -> bool:
    """`torch.rand(3, requires_grad=True)`, `x.requires_grad_()`."""
    if any(
        keyword.arg == "requires_grad" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        for keyword in node.keywords
    ):
        return True
    called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    return called == "requires_grad_" and not (node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value is False)


def given_back(function: ast.AST) -> list[ast.expr | None]:
    """The expressions a function returns or yields, inner functions left out."""
    if isinstance(function, ast.Lambda):
        return [function.body]
    found: list[ast.expr | None] = []

    def walk(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
                continue
            if isinstance(child, (ast.Return, ast.Yield, ast.YieldFrom)):
                found.append(child.value)
            walk(child)

    walk(function)
    return found
