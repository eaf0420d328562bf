"""Whether a value goes into a backward call, as far as the source of its file tells."""

from __future__ import annotations

import ast

from gradguard.analysis.program.expressions import given, inside, last_part
from gradguard.analysis.program.index import Program

_BACKWARD = frozenset({"backward", "manual_backward", "grad", "jacobian", "hessian", "vjp"})


def is_differentiated(program: Program, value: ast.AST) -> bool:
    """Whether a backward call of the file begins at something that can depend on an expression."""
    for call in inside(program.source.tree, ast.Call):
        if last_part(call) not in _BACKWARD:
            continue
        begun = [*given(call), *([call.func.value] if isinstance(call.func, ast.Attribute) else [])]
        for each in begun:
            if any(value is found or program.source.stands_in(value, found) for found in program.slice(each).expressions):
                return True
    return False


def repeated_by(program: Program, node: ast.AST) -> ast.stmt | ast.expr | None:
    """The outermost loop of its function, or comprehension, that evaluates a node again and again; None where nothing does."""
    loops = program.loops(node)
    found = loops[-1] if loops else None
    around = program.source.parents.get(found) if isinstance(found, ast.comprehension) else found
    return around if isinstance(around, (ast.stmt, ast.expr)) else None
