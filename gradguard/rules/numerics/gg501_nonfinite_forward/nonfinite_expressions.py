"""Looks through the source for the expression that can have made a value non-finite where no graph and no trace tells.

Data, targets, normalisation factors and advantages are computed without gradient, often in functions that have returned long ago.
What is left is the source: from the variable that is not finite to what it was assigned, into the user's functions that were
called for it, to expressions that can divide by zero, take the log of it, and the like.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from gradguard.analysis.places.source import ResolvedSite, at_line, function_def
from gradguard.analysis.program.bindings import assignments_to, dotted, names_read
from gradguard.analysis.program.expressions import argument, inside, last_part
from gradguard.analysis.program.index import writes_in
from gradguard.analysis.program.syntax import FUNCTIONS, Source, load
from gradguard.core.callsite import USER_FILES
from gradguard.core.safe_read import UNKNOWN, follow, function_code, in_class, unless_loud, unwrapped

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


Known = Callable[[ast.expr], float | None]  # the number that an expression is, where that is known


def is_risky(node: ast.AST, known: Known, of_one: bool = True) -> bool:
    """Whether an expression has an op that gives a non-finite result for some finite operand: a quotient, a log, a deviation of one.

    Args:
        node: the expression.
        known: tells the numbers that bound a divisor.
        of_one: whether the deviation of a whole tensor may be that of a single element.
    """
    for item in inside(node, ast.BinOp, ast.Call):
        if isinstance(item, ast.BinOp) and isinstance(item.op, ast.Div) and not _safe_divisor(item.right, known):
            return True
        if isinstance(item, ast.BinOp) and isinstance(item.op, ast.Pow) and _risky_exponent(item.right):
            return True
        if isinstance(item, ast.Call):
            name = last_part(item)
            if name in ("std", "var") and not of_one and _of_the_whole(item):
                continue
            if name in _CALLS and not (isinstance(item.func, ast.Attribute) and dotted(item.func.value) == "math"):
                return True
            if name in ("pow", "power", "float_power") and item.args and _risky_exponent(item.args[-1]):
                return True
    return False


def _of_the_whole(call: ast.Call) -> bool:
    """`x.std()` or `torch.std(x)`, without a dimension."""
    as_function = isinstance(call.func, ast.Attribute) and dotted(call.func.value) == "torch"
    return len(call.args) == as_function and not any(word.arg in ("dim", "axis") for word in call.keywords)


def _safe_divisor(node: ast.AST, known: Known) -> bool:
    """A number, a size, something clamped above 0 or with a number above 0 added."""
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        numbers = [number for side in (node.left, node.right) if (number := known(side)) is not None]
        return any(number > 0 for number in numbers)
    if isinstance(node, ast.Call):
        name = last_part(node)
        if name in ("clamp", "clamp_min", "clip"):
            method = isinstance(node.func, ast.Attribute) and dotted(node.func.value) != "torch"
            least = argument(node, "min", 0 if method else 1)
            number = None if least is None else known(least)
            return number is None or number > 0
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
        return argument(node, slot)
    if not isinstance(node, ast.BinOp):
        return None
    return {"self": node.left, "other": node.right}.get(slot)


def deviates_of_one(place: ResolvedSite, elements: int) -> bool:
    """Whether a statement takes the standard deviation (or variance) of what has one element only, which is NaN."""
    calls = (item.func for item in inside(place.statement, ast.Call))
    return elements == 1 and any(isinstance(called, ast.Attribute) and called.attr in ("std", "var") for called in calls)


class Search:
    """One search through the source.

    Args:
        lookup: names to live objects, to find the functions that are called.
    """

    def __init__(self, lookup: dict[str, Any]) -> None:
        self.lookup = lookup
        self.of_one = True  # see `is_risky`
        self.passed: set[tuple[str, int]] = set()  # places that were found already: the next one is looked for
        self._seen: set[tuple[str, int, str]] = set()
        self._scope: ast.AST | None = None  # of the expression at hand
        self._defaults: dict[str, Any] = {}  # the numbers that the parameters of the function at hand are

    def again(self, found: ResolvedSite) -> None:
        """The same search is to be made once more, past what it has found."""
        self.passed.add((found.file, found.line))
        self._seen.clear()

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
            for call in inside(operand or place.node or place.statement, ast.Call):
                if not isinstance(self.named(call.func), torch.nn.Module):  # what a module computes has a gradient and is in the graph
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
        for source, write in writes_in(sources, name):
            place = at_line(source.filename, write.node.lineno)
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
        self._scope = scope
        if is_risky(value, self._number, self.of_one) and (source.filename, value.lineno) not in self.passed:
            return at_line(source.filename, value.lineno)
        if depth <= 0:
            return None
        for call in inside(value, ast.Call):
            found = self._inside(call, depth - 1)
            if found is not None:
                return found
        return None if scope is None else self._names(source, scope, names_read(source, [value]), line - 1, depth)

    def _number(self, node: ast.expr) -> float | None:
        """A number as written, or that a name stands for: a default of the function that is searched, or a variable around the incident."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number = self._number(node.operand)
            return None if number is None else -number
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            left, right = self._number(node.left), self._number(node.right)
            return None if left is None or right is None else left * right
        if isinstance(node, ast.Attribute) and node.attr in ("eps", "tiny", "smallest_normal") and isinstance(node.value, ast.Call):
            return 1e-12 if (dotted(node.value.func) or "").endswith("finfo") else None
        found: Any
        if isinstance(node, ast.Constant):
            found = node.value
        elif isinstance(node, ast.Name):
            made = [] if self._scope is None else assignments_to(self._scope, node.id)
            if made:  # several values, or one that is computed: not known
                value = getattr(made[0], "value", None) if len(made) == 1 else None
                found = value.value if isinstance(value, ast.Constant) else None
            else:
                found = self._defaults.get(node.id, self.lookup.get(node.id))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found = _stored(self.lookup.get(node.value.id), node.attr)
        else:
            return None
        return float(found) if isinstance(found, (int, float)) and type(found) is not bool else None

    def _inside(self, call: ast.Call, depth: int) -> ResolvedSite | None:
        """Into a function of the user's: what its `return` gives, if only one expression there is risky."""
        return self.given_back(self.named(call.func), depth, call=call)

    def given_back(
        self, called: Any, depth: int = _DEPTH, part: tuple[int, int] | None = None, call: ast.Call | None = None
    ) -> ResolvedSite | None:
        """The expression behind what a function of the user's returns or yields.

        Args:
            called: the function, method or callable object.
            depth: how many calls deep to look.
            part: an item's index and the number of items, where only one item of a tuple matters.
            call: the call, which may pass other numbers than the defaults.
        """
        code = _code_of(called)
        if code is None or not USER_FILES[code.co_filename]:
            return None
        source, function = load(code.co_filename), function_def(code)
        if source is None or function is None or (code.co_filename, id(function), "") in self._seen:
            return None
        self._seen.add((code.co_filename, id(function), ""))
        outside, owner, defaults = self.lookup, _owner_of(called), self._defaults
        numbers = self._arguments(called, code, call)
        if owner is not None:
            self.lookup = {**outside, "self": owner}
        self._defaults = numbers
        try:
            for returned in _returns(function):
                wanted = returned
                if part is not None and isinstance(returned, ast.Tuple) and len(returned.elts) == part[1]:
                    wanted = returned.elts[part[0]]
                found = self._value(source, function, wanted, wanted.lineno, depth)
                if found is not None:
                    return found
        finally:
            self.lookup, self._defaults = outside, defaults
        return None

    def _arguments(self, called: Any, code: CodeType, call: ast.Call | None) -> dict[str, Any]:
        """What a function's parameters are, as far as they are numbers: those passed, and the defaults of the others."""
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        plain = called.__func__ if isinstance(called, MethodType) else called
        found: dict[str, Any] = dict.fromkeys(names)  # a variable around the incident with the same name is another one
        if isinstance(plain, FunctionType) and plain.__code__ is code:
            positional = names[: code.co_argcount]
            defaults = plain.__defaults__ or ()
            found.update(zip(positional[len(positional) - len(defaults) :], defaults, strict=True))
            found.update(plain.__kwdefaults__ or {})
        if call is not None:
            skipped = 1 if isinstance(called, MethodType) or not isinstance(called, FunctionType) else 0
            given = dict(zip(names[skipped:], call.args, strict=False)) | {keyword.arg: keyword.value for keyword in call.keywords}
            found.update({name: self._number(value) for name, value in given.items() if name in found})
        return found

    def named(self, node: ast.expr) -> Any:
        """The live object that an expression names, None where it names none."""
        name = dotted(node)
        if name is None:
            return None
        first, _, rest = name.partition(".")
        found = self.lookup.get(first)
        found = follow(found, rest) if rest and found is not None else found
        return None if found is UNKNOWN else found


def _code_of(obj: Any) -> Any:
    if isinstance(obj, type):
        return None
    if isinstance(obj, MethodType):
        obj = unless_loud(obj.__func__)
    if isinstance(obj, FunctionType):
        return function_code(unwrapped(obj))
    return function_code(in_class(type(obj), "forward" if isinstance(obj, torch.nn.Module) else "__call__"))


def _stored(owner: Any, name: str) -> Any:
    """An attribute that an object keeps in its own dict; nothing of the user's runs."""
    try:
        return object.__getattribute__(owner, "__dict__").get(name)
    except AttributeError:
        return None


def _owner_of(called: Any) -> Any:
    """What `self` is in a method, or in the `__call__` of an object."""
    if isinstance(called, MethodType):
        return unless_loud(called.__self__)
    return None if isinstance(called, (FunctionType, type)) else called


def _returns(function: ast.AST) -> Iterator[ast.expr]:
    if isinstance(function, ast.Lambda):
        yield function.body
        return
    pending: list[ast.AST] = list(getattr(function, "body", []))
    while pending:
        node = pending.pop(0)
        if isinstance(node, (ast.Return, ast.Yield)) and node.value is not None:
            yield node.value
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            pending += ast.iter_child_nodes(node)
