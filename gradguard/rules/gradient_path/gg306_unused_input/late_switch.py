"""A tensor that was made to require grad after it had been used: `requires_grad_()` below the computation. Part of GG306."""

from __future__ import annotations

import ast
from typing import NamedTuple

import torch

from gradguard.analysis.history.follower import Follower
from gradguard.analysis.incident import Incident
from gradguard.analysis.program.bindings import assignments_to, dotted
from gradguard.analysis.program.expressions import inside, is_constant, reads
from gradguard.analysis.program.index import program_of, writes_in
from gradguard.analysis.program.search_scopes import Scope, entry_by_name, entry_of, evaluate
from gradguard.analysis.program.syntax import Source
from gradguard.core.safe_read import UNKNOWN
from gradguard.fixes.diff import unified
from gradguard.rules.gradient_path import wanted

_DATA = {"shape", "dtype", "device", "size", "dim", "ndim", "numel", "requires_grad", "requires_grad_", "is_leaf", "grad", "new_zeros"}
_KEEPS = (ast.Assign, ast.AnnAssign, ast.AugAssign)  # what is only printed or checked goes nowhere


class Late(NamedTuple):
    """The statement that switches the gradient on, the statement above it that used the tensor, and the use in it."""

    switch: ast.stmt
    first: ast.stmt
    use: ast.expr
    source: Source


def found(incident: Incident, tensor: torch.Tensor, index: int) -> Late | None:
    """The switch in the function that asks for the gradient, where the tensor is read above it and not below it."""
    scope = Follower(incident).live(0)
    place, node = incident.place, wanted.input_node(incident, index)
    name = None if node is None else dotted(node)
    if (
        not tensor.is_leaf
        or isinstance(tensor, torch.nn.Parameter)
        or scope is None
        or place is None
        or place.statement is None
        or not name
    ):
        return None
    body = _block(scope.source, place.statement)
    end = body.index(place.statement) if place.statement in body else -1
    at = next((i for i in range(end - 1, -1, -1) if _switches(scope.source, body[i], name)), None)
    if at is None:
        return None
    root = name.partition(".")[0]
    bound = [statement for statement in assignments_to(scope.function, name) if statement.lineno > body[at].lineno]
    if bound or (root != name and any(s.lineno > body[at].lineno for s in assignments_to(scope.function, root))):
        return None
    if any(_used(statement, name, scope) for statement in body[at + 1 : end]):
        return None
    first = None
    made = [*assignments_to(scope.function, name), *assignments_to(scope.function, root)]
    for statement in reversed(body[:at]):
        if statement in assignments_to(scope.function, name):
            break
        use = _used(statement, name, scope)
        first = Late(body[at], statement, use, scope.source) if use is not None else first
        if statement in made:
            break
    return first


def moved(late: Late) -> str | None:
    """The diff that puts the switch above the use."""
    lines = [line if line.endswith("\n") else line + "\n" for line in late.source.lines]
    start, end, top = late.switch.lineno - 1, late.switch.end_lineno or late.switch.lineno, late.first.lineno - 1
    if top >= start:
        return None
    return unified(late.source, [*lines[:top], *lines[start:end], *lines[top:start], *lines[end:]])


def _block(source: Source, statement: ast.stmt) -> list[ast.stmt]:
    """The statements that a statement stands among."""
    above = source.parents.get(statement)
    for field in ("body", "orelse", "finalbody"):
        block = getattr(above, field, None)
        if isinstance(block, list) and statement in block:
            return block
    return []


def _switches(source: Source, statement: ast.stmt, name: str) -> bool:
    """`x.requires_grad_()` or `x.requires_grad = True`, as a statement of its own."""
    writes = [write for _, write in writes_in([source], "requires_grad") if source.statement(write.node) is statement]
    alone = isinstance(statement, (ast.Expr, ast.Assign)) and all(write.node in (statement, statement.value) for write in writes)
    return alone and any(is_constant(write.value, True) and write.owner is not None and dotted(write.owner) == name for write in writes)


def _used(statement: ast.stmt, name: str, scope: Scope) -> ast.expr | None:
    """Where a statement computes with the tensor: by its name, or in a function that is given the object it hangs on."""
    owner, _, last = name.rpartition(".")
    for node in inside(statement, ast.Name, ast.Attribute, ast.Call):
        if not isinstance(node, ast.Call) and isinstance(node.ctx, ast.Load) and dotted(node) == name:
            above = scope.source.parents.get(node)
            if (isinstance(above, ast.Attribute) and above.attr in _DATA) or not isinstance(statement, _KEEPS):
                continue
            return _whole(scope.source, node)
        if owner and isinstance(node, ast.Call) and _reads(node, owner, last, scope):
            return node
    return None


def _whole(source: Source, node: ast.expr) -> ast.expr:
    """The operation that a name takes part in, rather than the name."""
    whole = node
    for above in source.ancestors(node):
        if isinstance(above, ast.keyword):
            continue
        if not isinstance(above, ast.expr):
            break
        whole = above
    return whole


def _reads(call: ast.Call, owner: str, attribute: str, scope: Scope) -> bool:
    """Whether a called function of the user's reads `attribute` of the argument that is `owner`."""
    program, callee = program_of(scope.source), evaluate(call.func, scope)
    entry = entry_of(callee) if callee is not UNKNOWN else entry_by_name(call.func, scope)
    if program is None or entry is None:
        return False
    given = program.bind(call, entry.function).items()
    names = [name for name, value in given if isinstance(value, ast.expr) and dotted(value) == owner]
    return any(not _only_data(entry.source, read) for name in names for read in reads(entry.function, f"{name}.{attribute}"))


def _only_data(source: Source, node: ast.AST) -> bool:
    above = source.parents.get(node)
    return isinstance(above, ast.Attribute) and above.attr in _DATA
