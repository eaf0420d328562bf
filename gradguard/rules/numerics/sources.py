"""Looks through the source for the expression that can have made a value non-finite where no graph and no trace tells.

Data, targets, normalisation factors and advantages are computed without gradient, often in functions that have returned long ago.
What is left is the source: from the variable that is not finite to what it was assigned, into the user's functions that were
called for it, to expressions that can divide by zero, take the log of it, and the like.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from gradguard.callsite import USER_FILES
from gradguard.evidence.bindings import assignments_to, dotted, names_read
from gradguard.evidence.source import ResolvedSite, at_line, function_def
from gradguard.evidence.syntax import FUNCTIONS, Source, load

_CALLS = frozenset(
    {
        "log",
        "log2",
        "log10",
        "log1p",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "std",
        "var",
        "acos",
        "arccos",
        "asin",
        "arcsin",
        "div",
        "divide",
        "true_divide",
        "softmax",
        "log_softmax",
        "atanh",
        "arctanh",
        "logit",
        "exp",
    }
)
_SAFE_DIVISORS = frozenset({"clamp", "clamp_min", "clip", "len", "numel", "size", "maximum", "max", "sqrt", "float"})
_DEPTH = 4


def is_risky(node: ast.AST) -> bool:
    """Whether an expression has an op that gives a non-finite result for some finite operand: a quotient, a log, a deviation of one."""
    for item in ast.walk(node):
        if isinstance(item, ast.BinOp) and isinstance(item.op, ast.Div) and not _safe_divisor(item.right):
            return True
        if isinstance(item, ast.BinOp) and isinstance(item.op, ast.Pow) and _risky_exponent(item.right):
            return True
        if isinstance(item, ast.Call):
            name = item.func.attr if isinstance(item.func, ast.Attribute) else item.func.id if isinstance(item.func, ast.Name) else ""
            if name in _CALLS and not (isinstance(item.func, ast.Attribute) and dotted(item.func.value) == "math"):
                return True
            if name in ("pow", "power", "float_power") and item.args and _risky_exponent(item.args[-1]):
                return True
    return False


def _safe_divisor(node: ast.AST) -> bool:
    """A number, a size, something clamped or with something added."""
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (
            (isinstance(node.left, (ast.Constant, ast.Name, ast.Attribute)) and "eps" in ast.dump(node.left).lower())
            or isinstance(node.right, ast.Constant)
            or "eps" in ast.dump(node.right).lower()
        )
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
        return name in _SAFE_DIVISORS
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    return False


def _risky_exponent(node: ast.AST) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return True
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and (node.value < 0 or node.value != int(node.value))


def operand_of(place: ResolvedSite, slot: str) -> ast.expr | None:
    """The side of `a * b`, or the named argument of a call, that a graph node saved under this name."""
    node = place.node
    if isinstance(node, ast.Call):
        return next((keyword.value for keyword in node.keywords if keyword.arg == slot), None)
    if not isinstance(node, ast.BinOp):
        return None
    return {"self": node.left, "other": node.right}.get(slot)


def deviates_of_one(place: ResolvedSite, elements: int) -> bool:
    """Whether a statement takes the standard deviation (or variance) of what has one element only, which is NaN."""
    calls = (item.func for item in ast.walk(place.statement) if isinstance(item, ast.Call)) if place.statement is not None else ()
    return elements == 1 and any(isinstance(called, ast.Attribute) and called.attr in ("std", "var") for called in calls)


class Search:
    """One search through the source.

    Args:
        lookup: names to live objects, to find the functions that are called.
    """

    def __init__(self, lookup: dict[str, Any]) -> None:
        self.lookup = lookup
        self._seen: set[tuple[str, int, str]] = set()

    def behind(self, place: ResolvedSite, operand: ast.expr | None = None) -> ResolvedSite | None:
        """The expression behind what is read at a place (or behind one operand there), within its function and what that calls."""
        if place.source is None or place.statement is None:
            return None
        scope = place.enclosing_function or place.source.tree
        if scope is None:
            return None
        names = names_read(place.source, [operand]) if operand is not None else place.inner_names or place.statement_names
        found = self._names(place.source, scope, names, place.line, _DEPTH)
        if found is None:
            for call in (item for item in ast.walk(operand or place.node or place.statement) if isinstance(item, ast.Call)):
                if not hasattr(self._object(call.func), "_parameters"):  # what a module computes has a gradient and is in the graph
                    found = found or self._inside(call, _DEPTH)
        return found

    def statement(self, place: ResolvedSite) -> ResolvedSite | None:
        """The expression in a statement, or in the functions it calls."""
        value = getattr(place.statement, "value", None)
        if place.source is None or value is None:
            return None
        return self._value(place.source, place.enclosing_function or place.source.tree, value, place.line, _DEPTH)

    def attribute(self, sources: list[Source], name: str) -> ResolvedSite | None:
        """The expression behind `<object>.<name> = ...` in these files, where one such statement alone has any."""
        found: dict[tuple[str, int], ResolvedSite] = {}
        for source in sources:
            for node in ast.walk(source.tree) if source.tree is not None else ():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
                if any(isinstance(target, ast.Attribute) and target.attr == name for target in targets):
                    place = at_line(source.filename, node.lineno)  # type: ignore[attr-defined]
                    risky = None if place is None or place.statement is None else self.statement(place)
                    if risky is not None:
                        found[risky.file, risky.line] = risky
        return next(iter(found.values())) if len(found) == 1 else None

    def _names(self, source: Source, scope: ast.AST, names: list[str], before: int, depth: int) -> ResolvedSite | None:
        for name in names:
            key = (source.filename, id(scope), name)
            if depth <= 0 or key in self._seen:
                continue
            self._seen.add(key)
            made = [item for item in assignments_to(scope, name) if getattr(item, "value", None) is not None and item.lineno <= before]
            for statement in reversed(made):
                found = self._value(source, scope, statement.value, statement.lineno, depth - 1)  # type: ignore[attr-defined]
                if found is not None:
                    return found
        return None

    def _value(self, source: Source, scope: ast.AST | None, value: ast.expr, line: int, depth: int) -> ResolvedSite | None:
        if is_risky(value):
            return at_line(source.filename, value.lineno)
        if depth <= 0:
            return None
        for call in (item for item in ast.walk(value) if isinstance(item, ast.Call)):
            found = self._inside(call, depth - 1)
            if found is not None:
                return found
        return None if scope is None else self._names(source, scope, names_read(source, [value]), line - 1, depth)

    def _inside(self, call: ast.Call, depth: int) -> ResolvedSite | None:
        """Into a function of the user's: what its `return` gives, if only one expression there is risky."""
        code = _code_of(self._object(call.func))
        if code is None or not USER_FILES[code.co_filename]:
            return None
        source, function = load(code.co_filename), function_def(code)
        if source is None or function is None or (code.co_filename, id(function), "") in self._seen:
            return None
        self._seen.add((code.co_filename, id(function), ""))
        for returned in _returns(function):
            found = self._value(source, function, returned, returned.lineno, depth)
            if found is not None:
                return found
        return None

    def _object(self, node: ast.expr) -> Any:
        name = dotted(node)
        if name is None:
            return None
        first, *rest = name.split(".")
        found = self.lookup.get(first)
        for part in rest:
            found = getattr(found, part, None) if found is not None else None
        return found


def _code_of(obj: Any) -> Any:
    if isinstance(obj, type):
        return None
    if isinstance(obj, MethodType):
        obj = obj.__func__
    if isinstance(obj, FunctionType):
        while hasattr(obj, "__wrapped__"):
            obj = obj.__wrapped__
        return getattr(obj, "__code__", None)
    forward = getattr(type(obj), "forward", None) if hasattr(obj, "_parameters") else None
    return getattr(forward, "__code__", None)


def _returns(function: ast.AST) -> Iterator[ast.expr]:
    if isinstance(function, ast.Lambda):
        yield function.body
        return
    pending: list[ast.AST] = list(getattr(function, "body", []))
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            pending += ast.iter_child_nodes(node)
