"""The blocks around a node: its loops, the conditions under which it runs, the grad mode it runs in."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Literal, NamedTuple

from gradguard.analysis.program.bindings import full_name
from gradguard.analysis.program.syntax import COMPREHENSIONS, FUNCTIONS, Function, Source

Loop = ast.For | ast.AsyncFor | ast.While | ast.comprehension
GradMode = Literal["grad", "no_grad", "inference"]
_ENDS = (ast.Return, ast.Continue, ast.Break, ast.Raise)
_MODES: dict[str, tuple[GradMode, bool]] = {
    "no_grad": ("no_grad", True), "enable_grad": ("grad", True), "inference_mode": ("inference", True), "set_grad_enabled": ("grad", False),
}  # fmt: skip  # the mode that is switched to; whether without an argument


class Condition(NamedTuple):
    """A test that must have come out as `holds` for a node to run."""

    test: ast.expr
    holds: bool


def function_around(source: Source, node: ast.AST) -> Function | None:
    """The function or lambda whose code a node belongs to: decorators and defaults belong to what is outside."""
    child = node
    for above in source.ancestors(node):
        if isinstance(above, FUNCTIONS) and _runs_inside(above, child):
            return above
        child = above
    return None


def _runs_inside(function: ast.AST, child: ast.AST) -> bool:
    if isinstance(function, ast.Lambda):
        return child is function.body
    return any(child is statement for statement in getattr(function, "body", ()))


def class_around(source: Source, node: ast.AST) -> ast.ClassDef | None:
    """The innermost class in whose body a node stands."""
    child = node
    for above in source.ancestors(node):
        if isinstance(above, ast.ClassDef) and any(child is statement for statement in above.body):
            return above
        child = above
    return None


def loops_around(source: Source, node: ast.AST) -> list[Loop]:
    """The loops that run a node again and again in one call of its function, innermost first; what a loop computes once is not in it."""
    found: list[Loop] = []
    child = node
    for above in source.ancestors(node):
        if isinstance(above, FUNCTIONS) and _runs_inside(above, child):
            break
        if isinstance(above, (ast.For, ast.AsyncFor)):
            if child is above.target or any(child is statement for statement in above.body):
                found.append(above)
        elif isinstance(above, ast.While):
            if child is above.test or any(child is statement for statement in above.body):
                found.append(above)
        elif isinstance(above, ast.comprehension):  # the node is in its target, its tests or what it iterates
            if child is not above.iter:
                found.append(above)
        elif isinstance(above, COMPREHENSIONS):
            if isinstance(child, ast.comprehension):
                found.extend(reversed(above.generators[: above.generators.index(child)]))
            else:
                found.extend(reversed(above.generators))
        child = above
    return found


def conditions_of(source: Source, node: ast.AST) -> list[Condition]:
    """What must have come out which way for a node to run once its function runs, innermost first.

    Branches, `while` tests, conditional expressions, `and` and `or`, the filters of comprehensions, and earlier statements that leave
    the block (`if x is None: continue`). Tests that hold by exceptions are not among them.
    """
    found: list[Condition] = []
    child = node
    for above in source.ancestors(node):
        if isinstance(child, ast.stmt):
            found += _guards_before(above, child)
        if isinstance(above, FUNCTIONS) and _runs_inside(above, child):
            break
        if isinstance(above, (ast.If, ast.IfExp)) and child is not above.test:
            first = above.body if isinstance(above.body, list) else [above.body]
            found.append(Condition(above.test, any(child is part for part in first)))
        elif isinstance(above, ast.While) and any(child is part for part in above.body):
            found.append(Condition(above.test, True))
        elif isinstance(above, ast.BoolOp):
            place = above.values.index(child)  # type: ignore[arg-type]
            found += [Condition(value, isinstance(above.op, ast.And)) for value in reversed(above.values[:place])]
        elif isinstance(above, COMPREHENSIONS) and not isinstance(child, ast.comprehension):
            found += [Condition(test, True) for part in reversed(above.generators) for test in reversed(part.ifs)]
        elif isinstance(above, ast.match_case) and child is not above.guard and above.guard is not None:
            found.append(Condition(above.guard, True))
        child = above
    return found


def _guards_before(block: ast.AST, statement: ast.stmt) -> Iterator[Condition]:
    """The tests of earlier statements of the block that leave it one way."""
    for name in ("body", "orelse", "finalbody"):
        statements = getattr(block, name, None)
        if not isinstance(statements, list) or not any(statement is each for each in statements):
            continue
        before = statements[: next(i for i, each in enumerate(statements) if each is statement)]
        for each in reversed(before):
            if isinstance(each, ast.If):
                left, stayed = leaves(each.body), leaves(each.orelse)
                if left != stayed:
                    yield Condition(each.test, stayed)
            elif isinstance(each, ast.Assert):
                yield Condition(each.test, True)


def leaves(block: list[ast.stmt]) -> bool:
    """Whether a block never runs into what follows it."""
    for statement in block:
        if isinstance(statement, _ENDS):
            return True
        if isinstance(statement, ast.If) and leaves(statement.body) and leaves(statement.orelse):
            return True
        if isinstance(statement, (ast.With, ast.AsyncWith)) and leaves(statement.body):
            return True
    return False


def switched_mode(source: Source, expr: ast.expr) -> GradMode | Literal["unknown"] | None:
    """The grad mode that a context manager or a decorator switches to; None for one that does not switch it."""
    call = expr if isinstance(expr, ast.Call) else None
    called = expr.func if isinstance(expr, ast.Call) else expr
    name = ast.unparse(called) if isinstance(called, (ast.Name, ast.Attribute)) else ""
    full = full_name(source, name)
    known = _MODES.get(full.rpartition(".")[2])
    if known is None or not (full.startswith("torch.") or "." not in full):
        return None
    mode, bare = known
    given = [] if call is None else [*call.args, *(word.value for word in call.keywords if word.arg in ("mode", "enabled"))]
    if not given:
        return mode if bare else None
    if not isinstance(given[0], ast.Constant):
        return "unknown"
    if given[0].value:
        return mode
    return "grad" if mode == "inference" else "no_grad"


def own_mode(source: Source, node: ast.AST) -> GradMode | Literal["unknown"] | None:
    """The grad mode that the code around a node sets within its function; None where it is that of the caller."""
    child = node
    for above in source.ancestors(node):
        mode: GradMode | Literal["unknown"] | None = None
        if isinstance(above, (ast.With, ast.AsyncWith)):
            inside = any(child is statement for statement in above.body)
            items = above.items if inside else above.items[: above.items.index(child)] if child in above.items else []
            mode = next((found for item in reversed(items) if (found := switched_mode(source, item.context_expr))), None)
        earlier = _called_before(source, above, child)
        mode = earlier if earlier is not None else mode
        if mode is None and isinstance(above, FUNCTIONS) and _runs_inside(above, child):
            decorators = [] if isinstance(above, ast.Lambda) else above.decorator_list
            return next((found for item in reversed(decorators) if (found := switched_mode(source, item))), None)
        if mode is not None:
            return mode
        child = above
    return None


def _called_before(source: Source, block: ast.AST, statement: ast.AST) -> GradMode | Literal["unknown"] | None:
    """`torch.set_grad_enabled(False)` as a statement of its own, earlier in the block."""
    for name in ("body", "orelse", "finalbody"):
        statements = getattr(block, name, None)
        if not isinstance(statements, list) or not any(statement is each for each in statements):
            continue
        before = statements[: next(i for i, each in enumerate(statements) if each is statement)]
        for each in reversed(before):
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call):
                called = each.value.func
                if isinstance(called, (ast.Name, ast.Attribute)) and ast.unparse(called).rpartition(".")[2] == "set_grad_enabled":
                    return switched_mode(source, each.value)
    return None
