"""Where a value was made: follows an expression back through names, parameters, attributes, returns and loops.

Works on source, helped by the live variables of the frames around the incident. It stops where it is no longer sure; the
last spot of a trace is the farthest place that is known to be on the value's way.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from gradguard.analysis.places.source import assignments_to, dotted
from gradguard.analysis.program.blocks import function_around
from gradguard.analysis.program.definitions import ANY, Path, bound_value, returns_of
from gradguard.analysis.program.expressions import argument, calls_inside, inside, is_constant, last_part
from gradguard.analysis.program.index import Definition, program_of
from gradguard.analysis.program.scopes import (
    Scope,
    callee_scope,
    class_scopes,
    code_of,
    constructor_given,
    function_scope,
    loading_scope,
    only_instance,
)
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Role, SourceSpan
from gradguard.core.safe_read import UNKNOWN, elements, in_class, pairs, peek

Judge = Callable[[Any], "bool | None"]  # of a live value: is it (part of) what is looked for?
Maker = Callable[[ast.expr, Scope], "bool | None"]  # of an expression: does it make such a thing by itself?

_DEPTH = 24


@dataclass(frozen=True)
class Spot:
    """A place on the value's way: an expression in a scope, and the name its value was given there."""

    scope: Scope
    node: ast.expr | ast.stmt
    name: str | None = None

    @property
    def line(self) -> int:
        return self.node.lineno

    @property
    def file(self) -> str:
        return self.scope.source.filename

    @property
    def statement(self) -> ast.stmt | None:
        return self.scope.source.statement(self.node)

    @property
    def text(self) -> str:
        return self.scope.source.flat(self.node)

    def span(self, label: str | None = None, role: Role = "context") -> SourceSpan:
        return self.scope.source.span_of(self.node, label, role)


@dataclass
class Trace:
    """The way back from a use: `spots` from the use to the origin; `certain` when the origin evidently made the value."""

    spots: list[Spot] = field(default_factory=list)
    certain: bool = False

    @property
    def origin(self) -> Spot | None:
        return self.spots[-1] if self.spots else None

    @property
    def names(self) -> list[str]:
        """The names the value had on its way, in that order."""
        return list(dict.fromkeys(spot.name for spot in self.spots if spot.name))


def trace(scope: Scope, expr: ast.expr, judge: Judge, maker: Maker, path: Path = ()) -> Trace:
    """Follows `expr` (or the item of it that the path names) back to where its value was made."""
    return _Tracer(judge, maker).follow(scope, expr, path, 0)


class _Tracer:
    def __init__(self, judge: Judge, maker: Maker) -> None:
        self.judge = judge
        self.maker = maker
        self.seen: set[tuple[int, int, Path]] = set()

    def follow(self, scope: Scope, expr: ast.expr, path: Path, depth: int) -> Trace:
        key = (id(scope.tree), id(expr), path)
        if depth > _DEPTH or key in self.seen:
            return Trace()
        self.seen.add(key)
        if not path and self.judge(scope.evaluate(expr)) is False:
            return Trace()
        if isinstance(expr, (ast.Tuple, ast.List)):
            return self._items(scope, expr, path, depth)
        loaded = self._loaded(scope, expr, path, depth) if path[:1] == (ANY,) and isinstance(expr, (ast.Name, ast.Attribute)) else None
        if loaded is not None:
            return loaded
        if isinstance(expr, ast.Name):
            return self._name(scope, expr, path, depth)
        if isinstance(expr, ast.Attribute):
            return self._attribute(scope, expr, path, depth)
        if isinstance(expr, ast.Call):
            return self._call(scope, expr, path, depth)
        if isinstance(expr, (ast.ListComp, ast.GeneratorExp)):
            return self.follow(scope, expr.elt, path[1:] if path else (), depth + 1) if path else self._here(scope, expr)
        if isinstance(expr, ast.Dict):
            return self._key(scope, expr, path, depth)
        if isinstance(expr, ast.Subscript):
            constant = expr.slice.value if isinstance(expr.slice, ast.Constant) else None
            inner = (constant, *path) if isinstance(constant, (int, str)) else path
            value = scope.evaluate(expr.value)
            return self.follow(scope, expr.value, path if isinstance(value, torch.Tensor) else inner, depth + 1)
        if isinstance(expr, ast.NamedExpr):
            return self.follow(scope, expr.value, path, depth + 1)
        if isinstance(expr, ast.IfExp):
            return self._first(scope, [expr.body, expr.orelse], path, depth) or self._here(scope, expr)
        if isinstance(expr, ast.Starred):
            return self.follow(scope, expr.value, (ANY, *path), depth + 1)
        return self._operation(scope, expr, depth)

    def _here(self, scope: Scope, expr: ast.expr, certain: bool = False) -> Trace:
        return Trace([Spot(scope, expr)], certain)

    def _first(self, scope: Scope, exprs: list[ast.expr], path: Path, depth: int) -> Trace | None:
        traces = [self.follow(scope, expr, path, depth + 1) for expr in exprs]
        return next((t for t in traces if t.certain), None) or next((t for t in traces if t.spots), None)

    def _items(self, scope: Scope, expr: ast.Tuple | ast.List, path: Path, depth: int) -> Trace:
        index = path[0] if path else ANY
        if isinstance(index, str):
            return Trace()
        if 0 <= index < len(expr.elts) and not any(isinstance(e, ast.Starred) for e in expr.elts[: index + 1]):
            return self.follow(scope, expr.elts[index], path[1:], depth + 1)
        return self._first(scope, list(expr.elts), path[1:], depth) or Trace()

    def _key(self, scope: Scope, expr: ast.Dict, path: Path, depth: int) -> Trace:
        for key, value in zip(expr.keys, expr.values, strict=True):
            if path and isinstance(key, ast.Constant) and key.value == path[0]:
                return self.follow(scope, value, path[1:], depth + 1)
        return Trace() if path else self._operation(scope, expr, depth)

    def _part(self, scope: Scope, call: ast.Call, path: Path, depth: int) -> Trace | None:
        """A part, by its name, of what a call makes: `dict(x=..., y=...)`, or an object of a class that keeps what it is given."""
        given = next((word.value for word in call.keywords if word.arg == path[0]), None)
        kind = scope.evaluate(call.func)
        if given is None and isinstance(kind, type) and not any(isinstance(each, ast.Starred) for each in call.args):
            fields = elements(peek(kind, "_fields")) or [name for name, _ in pairs(peek(kind, "__dataclass_fields__"))]
            given = dict(zip(fields, call.args, strict=False)).get(path[0])
        return None if given is None else self.follow(scope, given, path[1:], depth + 1)

    def _bound(self, scope: Scope, statement: ast.stmt, name: str, path: Path, depth: int) -> Trace:
        bound = bound_value(statement, name)
        return Trace() if bound is None else self._from(scope, statement, name, *bound, path, depth)

    def _from(self, scope: Scope, statement: ast.stmt, name: str, value: ast.expr, inner: Path, path: Path, depth: int) -> Trace:
        further = self.follow(scope, value, (*inner, *path), depth + 1)
        if not further.spots:
            further = Trace([Spot(scope, value, name)], self.maker(value, scope) is True)
        first = further.spots[0]
        if first.scope is scope and first.statement is statement and first.name is None:
            return Trace([Spot(scope, first.node, name), *further.spots[1:]], further.certain)
        return Trace([Spot(scope, value, name), *further.spots], further.certain)

    def _name(self, scope: Scope, expr: ast.Name, path: Path, depth: int) -> Trace:
        if path and isinstance(path[0], str):
            above = max((each.line for each in nearest(scope.source, expr)), default=0)
            put = [each for each in _items_put(scope, expr.id, path[0]) if each.lineno >= above]
            if put:
                return self.follow(scope, put[0].value, path[1:], depth + 1) if len(put) == 1 else Trace()
        traces = [self._defined(scope, each, expr, path, depth) for each in nearest(scope.source, expr)]
        found = next((t for t in traces if t.certain), None) or next((t for t in traces if t.spots), Trace())
        grown = self._appended(scope, expr.id, path, depth) if path and not found.certain else None
        return grown or found

    def _defined(self, scope: Scope, definition: Definition, expr: ast.Name, path: Path, depth: int) -> Trace:
        """The way back over one of the definitions that can have given a name its value."""
        if definition.kind == "parameter":
            given = (scope.argument(expr.id) or constructor_given(scope, expr.id)) if definition.scope is scope.tree else None
            found = Trace() if given is None else self.follow(given[0], given[1], path, depth + 1)
            return Trace([Spot(scope, expr, expr.id), *found.spots], found.certain) if found.spots else found
        statement, home = scope.source.statement(definition.node), scope
        if not any(above is scope.tree for above in (definition.scope, *scope.source.ancestors(definition.node))):
            outer = definition.scope or scope.tree
            home = Scope(scope.source, outer, scope.globals if isinstance(outer, ast.Module) else {}, scope.globals)
        if statement is None or definition.value is None:
            return Trace()
        if definition.kind == "augmented" and isinstance(definition.node, ast.Name):
            before = nearest(scope.source, definition.node) if self.maker(definition.value, scope) is not True else []
            traces = [self._defined(scope, each, expr, path, depth + 1) for each in before if each is not definition and depth < _DEPTH]
            return next((t for t in traces if t.spots), Trace([Spot(home, statement, expr.id)], False))
        inner = tuple(ANY if item is None else item for item in definition.path)
        return self._from(home, statement, expr.id, definition.value, inner, path, depth)

    def _appended(self, scope: Scope, name: str, path: Path, depth: int) -> Trace | None:
        """What was put into a list: `name.append(value)`."""
        program = program_of(scope.source)
        grown = program.grows(name, scope.tree) if program is not None else []
        traces = (self.follow(scope, value, path[1:], depth + 1) for growth in grown for value in growth.values[:1])
        return next((found for found in traces if found.spots), None)

    def _loaded(self, scope: Scope, expr: ast.Name | ast.Attribute, path: Path, depth: int) -> Trace | None:
        """An item of a loader or a dataset that is there to be looked at: what its methods return, with its attributes at hand."""
        inner = loading_scope(scope.evaluate(expr))
        found = None if inner is None else self._first(inner, returns_of(inner)[::-1], path[1:], depth)
        return Trace([Spot(scope, expr, dotted(expr)), *found.spots], True) if found is not None and found.certain else None

    def _attribute(self, scope: Scope, expr: ast.Attribute, path: Path, depth: int) -> Trace:
        made = self.maker(expr, scope)
        if made:
            return self._here(scope, expr, True)
        owner = scope.evaluate(expr.value)
        held = None if isinstance(owner, torch.Tensor) else self._held(scope, expr, path, depth)
        if held is not None:
            return held
        if owner is UNKNOWN or isinstance(owner, torch.Tensor):
            return (
                self.follow(scope, expr.value, path, depth + 1)
                if isinstance(owner, torch.Tensor) or not dotted(expr)
                else self._here(scope, expr)
            )
        for spot in stores_of(owner, expr.attr):
            statement = spot.statement
            if statement is not None:
                found = self._bound(spot.scope, statement, spot.name, path, depth) if spot.name else self._stored(spot, path, depth)
                if found.spots:
                    return Trace([Spot(scope, expr, dotted(expr)), *found.spots], found.certain)
        outside = written_outside(scope, expr)
        found = Trace() if outside is None else self._stored(outside, path, depth)
        return Trace([Spot(scope, expr, dotted(expr)), *found.spots], True) if found.certain else self._here(scope, expr)

    def _held(self, scope: Scope, expr: ast.Attribute, path: Path, depth: int) -> Trace | None:
        """A field of an object that a call has made: `batch.y` of `batch = Batch(x, y)`."""
        owner = dotted(expr.value)
        if owner in (None, "self", "cls", "ctx"):
            return None
        found = self.follow(scope, expr.value, (expr.attr, *path), depth + 1)
        return found if found.certain else None

    def _stored(self, spot: Spot, path: Path, depth: int) -> Trace:
        assert isinstance(spot.node, ast.expr)
        return self.follow(spot.scope, spot.node, path, depth + 1)

    def _call(self, scope: Scope, call: ast.Call, path: Path, depth: int) -> Trace:
        name = last_part(call)
        if path and isinstance(path[0], str):
            part = self._part(scope, call, path, depth)
            if part is not None:
                return part
        if path[:1] == (ANY,):
            chosen = path[1] if len(path) > 1 and isinstance(path[1], int) else ANY
            if name == "enumerate" and call.args:
                return self.follow(scope, call.args[0], (ANY, *path[2:]), depth + 1) if path[1:2] == (1,) else Trace()
            if name == "zip" and 0 <= chosen < len(call.args):
                return self.follow(scope, call.args[chosen], (ANY, *path[2:]), depth + 1)
            collate = next((word.value for word in call.keywords if word.arg == "collate_fn"), None)
            if collate is not None:  # makes each item
                code, bound, names = code_of(scope.evaluate(collate))
                made_by = None if code is None else function_scope(code, bound, names)
                return Trace() if made_by is None else self._first(made_by, returns_of(made_by)[::-1], path[1:], depth) or Trace()
            if (
                name in ("tqdm", "list", "tuple", "iter", "reversed", "sorted", "next", "trange", "DataLoader", "islice", "cycle", "Subset")
                and call.args
            ):
                return self.follow(scope, call.args[0], path, depth + 1)
            if name == "random_split" and call.args:
                return self.follow(scope, call.args[0], path[1:], depth + 1)
            if name == "TensorDataset" and 0 <= chosen < len(call.args):
                return self.follow(scope, call.args[chosen], path[2:], depth + 1)
            if name == "DataLoader":
                given = argument(call, "dataset")
                if given is not None:
                    return self.follow(scope, given, path, depth + 1)
            value = scope.evaluate(call.func)
            if isinstance(value, type):
                code, _, names = code_of(peek(value, "__getitem__"))
                code, _, names = (code, _, names) if code is not None else code_of(peek(value, "__iter__"))
                inner = None if code is None else function_scope(code, only_instance(value), names)
                if inner is not None:
                    return self._first(inner, returns_of(inner)[::-1], path[1:], depth) or Trace()
        elif name == "next" and call.args:
            return self.follow(scope, call.args[0], (ANY, *path), depth + 1)
        inner = callee_scope(scope, call)
        if inner is not None:
            results = returns_of(inner)
            generator = any(inside(inner.tree, ast.Yield, ast.YieldFrom))
            found = self._first(inner, results[::-1], path[1:] if generator and path else path, depth)
            return Trace([Spot(scope, call), *found.spots], found.certain) if found is not None else self._here(scope, call)
        return self._operation(scope, call, depth)

    def _operation(self, scope: Scope, expr: ast.expr, depth: int) -> Trace:
        """A library's call or an operator: it made the value, or handed an operand's on."""
        made = self.maker(expr, scope)
        if made:
            return self._here(scope, expr, True)
        operands = list(operands_of(expr, scope))
        live = [(operand, self.judge(scope.evaluate(operand))) for operand in operands]
        for operand, verdict in live:
            if verdict:
                found = self.follow(scope, operand, (), depth + 1)
                return found if found.spots else self._here(scope, operand)
        if made is False:
            return Trace()
        for operand, verdict in live:
            if verdict is None:
                found = self.follow(scope, operand, (), depth + 1)
                if found.certain:
                    first = found.spots[0]
                    return found if first.statement is scope.source.statement(expr) else Trace([Spot(scope, expr), *found.spots], True)
        return self._here(scope, expr)


def _items_put(scope: Scope, name: str, key: str) -> list[ast.Assign]:
    """`name[key] = value` in a scope."""
    return [
        node
        for node in ast.walk(scope.tree)
        if isinstance(node, ast.Assign)
        and any(
            isinstance(target, ast.Subscript)
            and dotted(target.value) == name
            and isinstance(target.slice, ast.Constant)
            and target.slice.value == key
            for target in node.targets
        )
    ]


def nearest(source: Source, read: ast.expr) -> list[Definition]:
    """The definitions that can reach a read, the last above it first, those of an iteration before last."""
    program = program_of(source)
    found = program.reaching(read) if program is not None else ()
    return sorted(found, key=lambda each: (each.line <= read.lineno, each.line), reverse=True)


def operands_of(expr: ast.expr, scope: Scope) -> Iterator[ast.expr]:
    """The expressions whose values an operation works on: receiver and arguments of a call, both sides of an operator."""
    if isinstance(expr, ast.Call):
        if isinstance(expr.func, ast.Attribute) and _is_data(scope, expr.func.value):
            yield expr.func.value
        for argument in expr.args:
            if isinstance(argument, (ast.Tuple, ast.List)):
                yield from argument.elts
            else:
                yield argument
        for keyword in expr.keywords:
            if keyword.arg not in ("dtype", "device", "out"):
                yield keyword.value
    elif isinstance(expr, ast.BinOp):
        yield from (expr.left, expr.right)
    elif isinstance(expr, ast.UnaryOp):
        yield expr.operand
    elif isinstance(expr, ast.Compare):
        yield from (expr.left, *expr.comparators)
    elif isinstance(expr, ast.BoolOp):
        yield from expr.values


def _is_data(scope: Scope, node: ast.expr) -> bool:
    """Whether a method's receiver is worked on: not an imported module, nor an object whose method or submodule is called."""
    name = dotted(node)
    if name is not None and name.partition(".")[0] in scope.source.imports:
        return isinstance(scope.evaluate(node), torch.Tensor)
    value = scope.evaluate(node)
    if value is UNKNOWN:
        return name not in ("self", "cls", "ctx")
    return in_class(type(value), "dtype") is not UNKNOWN


def written_outside(scope: Scope, read: ast.Attribute) -> Spot | None:
    """The one statement of a file that gives an attribute of this name its value from outside of the object's methods."""
    program = program_of(scope.source)
    writes = [] if program is None else [write for write in program.writes(read.attr) if write.owner is not None]
    if len(writes) != 1 or writes[0].value is None or (isinstance(writes[0].owner, ast.Name) and writes[0].owner.id in ("self", "cls")):
        return None
    around = function_around(scope.source, writes[0].node) or scope.source.tree
    return None if around is None else Spot(Scope(scope.source, around, {}, scope.globals), writes[0].value, dotted(read))


def stores_of(owner: Any, attribute: str) -> list[Spot]:
    """The assignments `self.attribute = ...` in the methods of an object's class, those of a value first."""
    found: list[Spot] = []
    for scope in class_scopes(owner):
        parameters = scope.parameters()
        if not parameters:
            continue
        name = f"{parameters[0]}.{attribute}"
        for statement in assignments_to(scope.tree, name):
            bound = bound_value(statement, name)
            if bound is not None:
                found.append(Spot(scope, bound[0], name))
            elif isinstance(statement, ast.AugAssign):
                found.append(Spot(scope, statement, name))
        for call in calls_inside(scope.tree, "register_buffer"):
            if len(call.args) > 1 and is_constant(call.args[0], attribute):
                found.append(Spot(scope, call.args[1], None))
    return sorted(found, key=lambda spot: isinstance(spot.node, ast.Constant))
