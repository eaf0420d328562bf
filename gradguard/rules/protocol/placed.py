"""Statements that put a new module in place under a computed name or an index: `setattr(parent, name, Quantized(...))`, `layers[0] = ...`.

The name tells nothing here; what tells is the class: the statement, or the function it stands in, makes an object of the very class
that the model now has at that place.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torch import nn

from gradguard.analysis.places.source import ResolvedSite, dotted
from gradguard.analysis.program.syntax import Source
from gradguard.core.safe_read import store_of
from gradguard.rules.protocol.owners import Owner
from gradguard.rules.spans import function_around

_SETTERS = frozenset({"setattr", "add_module", "register_module", "set_submodule"})


def classes_on_the_way(owner: Owner) -> set[str]:
    """The classes of the modules that a parameter lies in, below the root: any of them may have been put in place."""
    found: set[str] = set()
    module: nn.Module | None = owner.root
    for part in owner.path.split(".")[:-1]:
        module = store_of(module, "_modules").get(part, module if part == owner.variable else None)
        if module is None:
            break
        if module is not owner.root:
            found.add(type(module).__name__)
    return found | ({type(owner.module).__name__} if owner.module is not owner.root else set())


def placing(source: Source, classes: set[str], made: ResolvedSite | None) -> Iterator[ast.stmt]:
    """Statements that put an object of one of these classes under a name or index that is computed.

    Args:
        made: where the optimizer was made. Other constructors have run before that.
    """
    for node in ast.walk(source.tree or ast.Module([], [])):
        value = _put(node)
        if value is None or not isinstance(node, ast.stmt):
            continue
        around = function_around(source, node)
        if getattr(around, "name", None) == "__init__" and (made is None or around is not made.enclosing_function):
            continue
        values = [value]
        if isinstance(value, ast.Name):
            scope = around or source.tree or node
            values = [each.value for each in ast.walk(scope) if isinstance(each, ast.Assign) and _binds(each, value.id)]
        if any(_makes(each, classes) for each in values):
            yield node


def _put(node: ast.AST) -> ast.expr | None:
    """What a statement puts in place, where it is one of these."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        return node.value
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and len(call.args) >= 2 and (dotted(call.func) or "").rpartition(".")[2] in _SETTERS:
        return call.args[-1]
    return None


def _binds(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def _makes(node: ast.expr, classes: set[str]) -> bool:
    """Whether an expression calls one of the classes, or a method of theirs (`Quantized.from_float(child)`)."""
    calls = (each for each in ast.walk(node) if isinstance(each, ast.Call))
    return any(part in classes for call in calls for part in (dotted(call.func) or "").split("."))
