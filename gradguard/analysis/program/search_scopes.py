"""Scopes of a static search: which object an expression means, which function a call enters, which statements define a name.

Nothing of the user's is called: attributes are read without properties, `__getattr__` or descriptors.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from gradguard.analysis.live.frames import FrameView
from gradguard.analysis.places.source import function_def
from gradguard.analysis.program.bindings import assignments_to, dotted, flatten, targets_of
from gradguard.analysis.program.syntax import FUNCTIONS, Function, Source, load
from gradguard.core.callsite import USER_FILES
from gradguard.core.safe_read import UNKNOWN, item_of, namespace, peek, store_of, unless_loud

_GROWS = {"append", "extend", "insert", "add", "update", "put", "appendleft", "copy_", "add_", "scatter_", "scatter_add_",
          "index_put_", "index_add_", "index_copy_", "masked_scatter_"}  # fmt: skip


@dataclass(eq=False)
class Scope:
    """A function (or module) whose names are being followed.

    Attributes:
        env: objects by name: a live frame's variables, or what is known of a call's arguments.
        view: the live frame, if it is one.
        level: its position among the user frames, to find its caller.
        given: for a function entered by a call: what its parameters got (results of the search, by name).
    """

    source: Source
    function: Function | ast.Module
    env: dict[str, Any]
    globals: Mapping[str, Any]
    view: FrameView | None = None
    level: int = 0
    given: dict[str, Any] = field(default_factory=dict)
    depth: int = 0


class Entry(NamedTuple):
    """A function of the user's that a call enters."""

    source: Source
    function: Function
    bound: Any  # what `self` is, UNKNOWN for a plain function
    globals: Mapping[str, Any]


class Definition(NamedTuple):
    """A place that gives a name its value."""

    value: ast.expr
    pick: int | str | None  # which element of the value
    looped: bool  # the value is iterated over
    statement: ast.stmt


def evaluate(node: ast.AST, scope: Scope) -> Any:
    """The object that a plain expression means, UNKNOWN where only running it could tell."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        if node.id in scope.env:
            return scope.env[node.id]
        if isinstance(scope.function, FUNCTIONS) and node.id in _own_names(scope.function):
            return UNKNOWN
        return scope.globals.get(node.id, UNKNOWN)
    if isinstance(node, ast.Attribute):
        return peek(evaluate(node.value, scope), node.attr)
    if isinstance(node, ast.Subscript):
        base, key = evaluate(node.value, scope), evaluate(node.slice, scope)
        return UNKNOWN if base is UNKNOWN or key is UNKNOWN else item_of(base, key)
    return UNKNOWN


def _own_names(function: Function) -> set[str]:
    arguments = function.args
    names = {item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    body = [function.body] if isinstance(function, ast.Lambda) else function.body
    for part in body:
        for node in ast.walk(part):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names


def entry_of(callee: Any) -> Entry | None:
    """The user's function that calling this object runs; None for libraries' and unknown ones."""
    bound: Any = UNKNOWN
    while isinstance(callee, nn.Module) and (inner := store_of(callee, "_modules").get("_orig_mod")) is not None:  # torch.compile's
        callee = inner
    if isinstance(callee, nn.Module):
        callee = peek(callee, "forward")
    for _ in range(8):
        if isinstance(callee, MethodType):
            bound, callee = unless_loud(callee.__self__), unless_loud(callee.__func__)
        elif isinstance(callee, partial):
            callee = unless_loud(callee.func)
        elif isinstance(callee, FunctionType) and "__wrapped__" in callee.__dict__:
            callee = callee.__dict__["__wrapped__"]
        elif isinstance(callee, FunctionType) and "_torchdynamo_orig_callable" in callee.__dict__:
            callee = callee.__dict__["_torchdynamo_orig_callable"]
        elif (
            not isinstance(callee, FunctionType)
            and not isinstance(callee, type)
            and isinstance(peek(type(callee), "__call__"), FunctionType)
        ):
            callee = MethodType(peek(type(callee), "__call__"), callee)
        else:
            break
    if not isinstance(callee, FunctionType) or not USER_FILES[callee.__code__.co_filename]:
        return None
    function, source = function_def(callee.__code__), load(callee.__code__.co_filename)
    return None if function is None or source is None else Entry(source, function, bound, namespace(callee.__globals__))


def entry_by_name(func: ast.expr, scope: Scope) -> Entry | None:
    """The function of the same file that a call's text means, where no live object tells."""
    source = scope.source
    if source.tree is None:
        return None
    if isinstance(func, ast.Name):
        found = next(
            (
                node
                for node in source.scopes
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                and node.name == func.id
                and not isinstance(source.parents.get(node), ast.ClassDef)
            ),
            None,
        )
        return None if found is None else Entry(source, found, UNKNOWN, scope.globals)
    if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == "self":
        cls = (
            next((above for above in source.ancestors(scope.function) if isinstance(above, ast.ClassDef)), None)
            if isinstance(scope.function, FUNCTIONS)
            else None
        )
        for node in cls.body if cls is not None else ():
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == func.attr:
                return Entry(source, node, scope.env.get("self", UNKNOWN), scope.globals)
    return None


def definitions(scope: Scope, name: str, use: ast.AST) -> list[Definition]:
    """The statements that may have given `name` its value at `use`, the nearest first; what a list grew by included."""
    body: ast.AST = scope.function
    at = (getattr(use, "lineno", 10**9), getattr(use, "col_offset", 0))
    candidates = [(statement, True) for statement in assignments_to(body, name)]
    candidates += [(statement, False) for statement in growing(body, name)]
    candidates.sort(key=lambda item: (item[0].lineno, item[0].col_offset))
    own = scope.source.statement(use)
    before = [
        item
        for item in candidates
        if ((item[0].end_lineno or item[0].lineno, item[0].end_col_offset or 0) <= at and item[0] is not own)
        or (isinstance(item[0], (ast.For, ast.With)) and _within(scope.source, use, item[0]))
    ]
    chosen: list[tuple[ast.stmt, bool]] = []
    for statement, strong in reversed(before):
        chosen.append((statement, strong))
        if strong and not isinstance(statement, ast.AugAssign) and _dominates(scope.source, statement, use):
            break
    else:
        chosen += [item for item in candidates if item not in before and item[0] is not own] if not chosen else []
    return [definition for statement, _ in chosen for definition in _values(scope.source, statement, name)]


def growing(body: ast.AST, name: str) -> list[ast.stmt]:
    """Statements that put something into `name`: `name.append(x)`, `name[i] = x`."""
    found: list[ast.stmt] = []
    for node in ast.walk(body):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
            if node.value.func.attr in _GROWS and dotted(node.value.func.value) == name and node.value.args:
                found.append(node)
        elif isinstance(node, (ast.Assign, ast.AugAssign)):
            for target in targets_of(node):
                if isinstance(target, ast.Subscript) and dotted(target.value) == name:
                    found.append(node)
    return found


def _within(source: Source, node: ast.AST, block: ast.AST) -> bool:
    return any(above is block for above in source.ancestors(node))


def _dominates(source: Source, statement: ast.stmt, use: ast.AST) -> bool:
    """Whether the statement surely ran before the use: every branch or loop around it is around the use too."""
    around = set(source.ancestors(use))
    if isinstance(statement, (ast.For, ast.AsyncFor)):
        return statement in around
    for above in source.ancestors(statement):
        if isinstance(above, (*FUNCTIONS, ast.Module)):
            return True
        if isinstance(above, (ast.If, ast.For, ast.While, ast.Try, ast.Match, ast.ExceptHandler)) and above not in around:
            return False
        if isinstance(above, ast.If) and above in around and _branch(source, above, statement) != _branch(source, above, use):
            return False
    return True


def _branch(source: Source, block: ast.If, node: ast.AST) -> bool:
    chain = [node, *source.ancestors(node)]
    return any(part in chain for part in block.orelse)


def _values(source: Source, statement: ast.stmt, name: str) -> Iterator[Definition]:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        for argument in statement.value.args:
            yield Definition(
                argument,
                None,
                statement.value.func.attr == "extend" if isinstance(statement.value.func, ast.Attribute) else False,
                statement,
            )
        return
    if isinstance(statement, (ast.For, ast.AsyncFor)):
        yield Definition(statement.iter, _position(statement.target, name), True, statement)
        return
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        for item in statement.items:
            if item.optional_vars is not None and any(dotted(single) == name for single in flatten(item.optional_vars)):
                yield Definition(item.context_expr, None, False, statement)
        return
    if isinstance(statement, ast.AugAssign):
        yield Definition(statement.value, None, False, statement)
        return
    if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            if isinstance(target, (ast.Tuple, ast.List)):
                position = _position(target, name)
                value = statement.value
                if isinstance(value, (ast.Tuple, ast.List)) and isinstance(position, int) and len(value.elts) == len(target.elts):
                    yield Definition(value.elts[position], None, False, statement)
                elif position is not None:
                    yield Definition(value, position, False, statement)
                elif any(isinstance(single, ast.Subscript) and dotted(single.value) == name for single in flatten(target)):
                    yield Definition(value, None, False, statement)
            elif dotted(target) == name or (isinstance(target, ast.Subscript) and dotted(target.value) == name):
                yield Definition(statement.value, None, False, statement)
    for node in ast.walk(statement):
        if isinstance(node, ast.NamedExpr) and node.target.id == name:
            yield Definition(node.value, None, False, statement)


def _position(target: ast.expr, name: str) -> int | None:
    """Which element of an unpacked value a name gets."""
    if isinstance(target, (ast.Tuple, ast.List)):
        for i, element in enumerate(target.elts):
            if any(dotted(single) == name for single in flatten(element)):
                return i
    return None
