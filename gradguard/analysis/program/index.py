"""The questions that may be asked of one file: where values come from and go to, what runs where, who calls whom.

    program = program_of(filename)
    program.reaching(read)          the definitions that can reach a read
    program.slice(expr)             what a value can depend on, across calls

Answers are sets that contain what can happen; `UNKNOWN` in one of them stands for what the file does not show. Nothing is ever
chosen among several answers: who needs one asks `only(...)`. Nothing of the user's runs. The index of definitions is built when the first
question needs it.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar

import torch

from gradguard.analysis.program.bindings import dotted, full_name, targets_of
from gradguard.analysis.program.blocks import (
    Condition,
    GradMode,
    Loop,
    class_around,
    conditions_of,
    function_around,
    loops_around,
    own_mode,
)
from gradguard.analysis.program.reaching import UNKNOWN, Definition, Reaching, arguments_of, default_of
from gradguard.analysis.program.syntax import FUNCTIONS, Function, Source, load

__all__ = ["UNKNOWN", "Definition", "Program", "calls_in", "only", "program_of", "programs_of", "writes_in"]

T = TypeVar("T")
_MAX_FILES = 128
GROWING_METHODS = {
    *("append", "appendleft", "extend", "extendleft", "insert", "add", "update", "setdefault", "put", "put_nowait"),
    *("push", "enqueue", "store", "__setitem__"),
}  # fmt: skip
_GROWING_CALLS = {"heapq.heappush", "heapq.heappushpop", "bisect.insort", "bisect.insort_left", "bisect.insort_right"}
_REGISTERING = ("register_parameter", "register_buffer", "register_module", "add_module")
_OF_OBJECTS = ("__init__", "__call__", "forward")  # run by a call of a class or of an instance


def only(found: Collection[T]) -> T | None:
    """The one answer; None where there are several, or none."""
    return next(iter(found)) if len(found) == 1 else None


class Write(NamedTuple):
    """A place that writes an attribute."""

    node: ast.stmt | ast.Call
    owner: ast.expr | None
    """The object whose attribute it is, as written."""
    value: ast.expr | None
    """What is written; None where it is one of several things (an item of what a loop goes over, an augmented assignment)."""


class Growth(NamedTuple):
    """A place that puts something into a container."""

    node: ast.stmt | ast.Call
    values: tuple[ast.expr, ...]


@dataclass
class Slice:
    """What a value can depend on: expressions, and the definitions that they come by, the nearest first."""

    expressions: dict[ast.expr, None] = field(default_factory=dict)
    definitions: dict[Definition, None] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether all of it is in the file."""
        return UNKNOWN not in self.definitions

    def __contains__(self, node: object) -> bool:
        return node in self.expressions or node in self.definitions


class Program:
    """One file of the user's."""

    def __init__(self, source: Source) -> None:
        self.source = source

    # Definitions and reads

    @cached_property
    def _reaching(self) -> Reaching:
        return Reaching(self.source)

    def reaching(self, read: ast.expr) -> frozenset[Definition]:
        """Every definition that can have given a name its value at a read; empty where the read can't run or the name is unbound.

        Of an augmented assignment's target it is what the statement reads.
        """
        return self._reaching.reads.get(read, frozenset())

    @cached_property
    def _uses(self) -> dict[Definition, list[ast.expr]]:
        found: dict[Definition, list[ast.expr]] = {}
        for read, definitions in self._reaching.reads.items():
            for definition in definitions:
                found.setdefault(definition, []).append(read)
        for reads in found.values():
            reads.sort(key=_place)
        return found

    def uses(self, definition: Definition) -> list[ast.expr]:
        """The reads that a definition can reach, in source order; none: a dead store."""
        return self._uses.get(definition, [])

    def definitions(self, name: str, scope: ast.AST | None = None) -> set[Definition]:
        """Every definition of a variable, in whichever scope or in one."""
        found = self._reaching.definitions.items()
        return {each for (owner, known), every in found if known == name and (scope is None or owner is scope) for each in every}

    @cached_property
    def _of_node(self) -> dict[ast.AST, list[Definition]]:
        found: dict[ast.AST, list[Definition]] = {}
        for every in self._reaching.definitions.values():
            for each in every:
                found.setdefault(each.node, []).append(each)
        return found

    def defined_by(self, node: ast.AST) -> set[Definition]:
        """The definitions that a statement (or a target, parameter, alias in it) makes itself, in order of nothing."""
        inside = [node] if not isinstance(node, ast.stmt) or isinstance(node, (ast.FunctionDef, ast.ClassDef)) else _own_nodes(node)
        return {definition for each in inside for definition in self._of_node.get(each, ())}

    def values(self, expr: ast.expr) -> set[ast.expr | Definition]:
        """The expressions that a name can stand for, through plain assignments; any other expression stands for itself.

        A definition among them (a parameter, a function, an item of something) is one that no expression gives whole; a name is one that
        the file does not define.
        """
        found: set[ast.expr | Definition] = set()
        seen: set[ast.expr] = set()
        pending = [expr]
        while pending:
            current = pending.pop()
            if current in seen:
                continue
            seen.add(current)
            if isinstance(current, ast.NamedExpr):
                pending.append(current.value)
            elif isinstance(current, ast.IfExp):
                pending += [current.body, current.orelse]
            elif not isinstance(current, ast.Name):
                found.add(current)
            else:
                for definition in self.reaching(current):
                    if definition.kind == "assign" and definition.value is not None and not definition.path:
                        pending.append(definition.value)
                    else:
                        found.add(current if definition is UNKNOWN else definition)
        return found

    def slice(self, expr: ast.expr, depth: int = 3) -> Slice:
        """What the value of an expression can depend on, backwards; through at most `depth` calls each way.

        Includes what is put into the containers that it reads, the arguments of the calls that a parameter can come from, what called
        functions return and what is written to the attributes that are read. What decides branches is not data and not in it.
        """
        found = Slice()
        pending = deque([(expr, depth)])
        while pending:
            current, left = pending.popleft()
            if current in found.expressions:
                continue
            found.expressions.setdefault(current)
            for node in ast.walk(current):
                if isinstance(node, ast.Name):
                    for definition in sorted(self.reaching(node), key=lambda each: -each.line):
                        found.definitions.setdefault(definition)
                        pending += [(value, to) for value, to in self._sources(definition, left) if to >= 0]
                        if definition.kind == "augmented":
                            pending.append((definition.node, left))  # type: ignore[arg-type]
                    if isinstance(node.ctx, ast.Load):
                        pending += [(value, left) for growth in self.grows(node.id) if self._same(growth, node) for value in growth.values]
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and not self._is_tensor_method(node):
                    pending += [(write.value, left) for write in self.writes(node.attr) if write.value is not None]
                    pending += [(value, left) for growth in self.grows(dotted(node) or "") for value in growth.values]
                elif isinstance(node, ast.Call) and left > 0:
                    callees = self.callees(node)
                    pending += [(value, left - 1) for callee in callees if isinstance(callee, FUNCTIONS) for value in self.returns(callee)]
        return found

    def _is_tensor_method(self, node: ast.Attribute) -> bool:
        """Whether an attribute is called by the name of a method of tensors: `x.mean()` reads nothing that is kept in a `self.mean`."""
        above = self.source.parents.get(node)
        return isinstance(above, ast.Call) and above.func is node and hasattr(torch.Tensor, node.attr)

    def _same(self, growth: Growth, read: ast.Name) -> bool:
        """Whether a growth of a name is one of the same variable."""
        grown = next((n for n in ast.walk(growth.node) if isinstance(n, ast.Name) and n.id == read.id and n is not read), None)
        return grown is not None and bool(self.reaching(grown) & self.reaching(read))

    def _sources(self, definition: Definition, left: int) -> Iterator[tuple[ast.expr, int]]:
        if definition.value is not None and definition.kind != "parameter":
            yield definition.value, left
        if definition.kind == "parameter" and isinstance(definition.scope, FUNCTIONS):
            for call in self.callers(definition.scope):
                given = self.bind(call, definition.scope).get(definition.name)
                if isinstance(given, ast.expr):
                    yield given, left - 1
            if definition.value is not None:
                yield definition.value, left

    # Blocks

    def conditions(self, node: ast.AST) -> list[Condition]:
        """The tests that must have come out one way for a node to run once its function runs, innermost first."""
        return conditions_of(self.source, node)

    def loops(self, node: ast.AST) -> list[Loop]:
        """The loops of its function that run a node again and again, innermost first."""
        return loops_around(self.source, node)

    def function(self, node: ast.AST) -> Function | None:
        """The function whose code a node belongs to; None at the level of the module or a class."""
        return function_around(self.source, node)

    def cls(self, node: ast.AST) -> ast.ClassDef | None:
        """The innermost class that a node stands in."""
        return class_around(self.source, node)

    def grad_mode(self, node: ast.AST, depth: int = 4) -> set[GradMode | Literal["unknown"]]:
        """The grad modes that a node can run in: what the blocks and decorators around it set, else what its callers run in."""
        own = own_mode(self.source, node)
        if own is not None:
            return {own}
        function = self.function(node)
        if function is None:
            return {"grad"}
        if depth == 0:
            return {"unknown"}
        calls = self.callers(function)
        if not calls or self._leaves_the_file(function):
            return {"unknown", *(mode for call in calls for mode in self.grad_mode(call, depth - 1))}
        return {mode for call in calls for mode in self.grad_mode(call, depth - 1)}

    def _leaves_the_file(self, function: Function) -> bool:
        """Whether code outside the file can call a function: it is a value somewhere, or a method that torch calls."""
        if isinstance(function, ast.Lambda):
            return True
        called = {call.func for call in self.callers(function)}
        reads = [read for definition in self._of_node.get(function, ()) for read in self.uses(definition)]
        return any(read not in called for read in reads)

    # Calls

    @cached_property
    def _calls(self) -> list[ast.Call]:
        if self.source.tree is None:
            return []
        return sorted((node for node in self.source.parents if isinstance(node, ast.Call)), key=_place)

    def names_of(self, callee: ast.expr) -> set[str]:
        """The dotted names that a called expression can stand for: imports resolved, other names followed (`push = xs.append`)."""
        found: set[str] = set()
        for value in self.values(callee):
            if isinstance(value, Definition):
                found.add(self._imported(value) if value.kind == "import" else value.name)
            elif (path := dotted(value)) is not None:
                found.add(self._full(value, path))
            elif isinstance(value, ast.Attribute):
                found.add("." + value.attr)
            elif isinstance(value, ast.Call) and self._is_partial(value) and value.args:
                found |= self.names_of(value.args[0])
        return found

    def _is_partial(self, call: ast.Call) -> bool:
        return call.func is not call and any(name.rpartition(".")[2] == "partial" for name in self.names_of(call.func))

    def _full(self, value: ast.expr, name: str) -> str:
        first = value
        while isinstance(first, ast.Attribute):
            first = first.value
        definition = only(self.reaching(first))
        rest = name.partition(".")[2]
        if definition is not None and definition.kind == "import":
            return self._imported(definition) + ("." + rest if rest else "")
        return full_name(self.source, name) if definition is UNKNOWN else name

    def _imported(self, definition: Definition) -> str:
        alias = definition.node
        assert isinstance(alias, ast.alias)
        statement = self.source.parents.get(alias)
        if isinstance(statement, ast.ImportFrom):
            return "." * statement.level + (f"{statement.module}." if statement.module else "") + alias.name
        return alias.name if alias.asname else definition.name

    def calls(self, *names: str) -> list[ast.Call]:
        """The calls of what has one of these names, in source order: full dotted names (`torch.optim.Adam`), or last parts of any
        (`step`)."""
        if not any(self.mentions(name.rpartition(".")[2]) for name in names):
            return []
        return [call for call, known in self._called if any(each == name or each.endswith("." + name) for each in known for name in names)]

    def mentions(self, word: str) -> bool:
        """Whether the text has a word at all: what it does not have, no name in it stands for."""
        return any(word in line for line in self.source.lines)

    @cached_property
    def _called(self) -> list[tuple[ast.Call, set[str]]]:
        return [(call, self.names_of(call.func)) for call in self._calls]

    def callees(self, call: ast.Call) -> set[Function | Definition]:
        """The functions of the file that a call can run, with `UNKNOWN` where it can be another: a class runs its `__init__`, an
        instance of a class of the file its `__call__` or `forward`."""
        found: set[Function | Definition] = set()
        for value in self.values(call.func):
            found |= self._run_by(value)
        return found

    def _run_by(self, value: ast.expr | Definition) -> set[Function | Definition]:
        if isinstance(value, Definition):
            if value.kind == "function" and isinstance(value.node, FUNCTIONS):
                return {value.node}
            if value.kind == "class" and isinstance(value.node, ast.ClassDef):
                return set(self._method(value.node, "__init__"))
            return {UNKNOWN}
        if isinstance(value, ast.Lambda):
            return {value}
        if isinstance(value, ast.Attribute):
            classes = self.classes(value.value)
            found: set[Function | Definition] = set()
            for each in classes:
                found |= self._method(each, value.attr) if isinstance(each, ast.ClassDef) else {UNKNOWN}
            if UNKNOWN in found or not classes:  # of an object that is not known: any method of that name
                found |= {UNKNOWN, *self._methods.get(value.attr, ())}
            for write in self.writes(value.attr):  # a module, or a function, that is kept in an attribute
                for held in self.values(write.value) if write.value is not None else ():
                    found |= self._run_held(held)
            return found
        return self._run_held(value)

    def _run_held(self, value: ast.expr | Definition) -> set[Function | Definition]:
        """What runs when an object is called that an expression has made."""
        if isinstance(value, Definition):
            return self._run_by(value) if value.kind == "function" else {UNKNOWN}
        if not isinstance(value, ast.Call):
            return self._run_by(value) if isinstance(value, ast.Lambda) else {UNKNOWN}
        if self._is_partial(value) and value.args:
            return {each for inner in self.values(value.args[0]) for each in self._run_by(inner)}
        found: set[Function | Definition] = set()
        for each in self.classes(value):
            found |= (self._method(each, "__call__") or self._method(each, "forward")) if isinstance(each, ast.ClassDef) else {UNKNOWN}
        return found

    def functions(self, expr: ast.expr, depth: int = 2) -> list[Function]:
        """The functions of the file that a value is, or runs when it is called; of a parameter, those that callers give, and of a call,
        those among what it returns."""
        found: set[Function | Definition] = set()
        for value in self.values(expr):
            found |= self._run_by(value)
            if isinstance(value, ast.Call) and depth:
                callees = [each for each in self.callees(value) if isinstance(each, FUNCTIONS)]
                made = [each for callee in callees if getattr(callee, "name", "") not in _OF_OBJECTS for each in self.returns(callee)]
                found |= {each for returned in made for each in self.functions(returned, depth - 1)}
            elif isinstance(value, Definition) and isinstance(value.scope, FUNCTIONS) and value.kind == "parameter":
                found |= {run for cls in self.classes(expr) if isinstance(cls, ast.ClassDef) for run in self._method(cls, "__call__")}
                given = [self.bind(call, value.scope).get(value.name) for call in self.callers(value.scope)] if depth else []
                found |= {each for one in given if isinstance(one, ast.expr) for each in self.functions(one, depth - 1)}
        return sorted((each for each in found if isinstance(each, FUNCTIONS)), key=_place)

    def functions_named(self, name: str) -> list[Function]:
        """The functions of this name, and what instances of classes of this name run when they are called."""
        found = [node for node in self.source.scopes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name]
        runs = [each for cls in self._classes if cls.name == name for each in self._method(cls, "__call__") or self._method(cls, "forward")]
        return [*found, *(each for each in runs if isinstance(each, FUNCTIONS))]

    def classes(self, expr: ast.expr) -> set[ast.ClassDef | Definition]:
        """The classes of the file that an object can be an instance of, with `UNKNOWN` where it can be another's."""
        found: set[ast.ClassDef | Definition] = set()
        for value in self.values(expr):
            if isinstance(value, Definition):
                cls = self.cls(value.scope) if value.kind == "parameter" and value.scope is not None else None
                if cls is not None and isinstance(value.scope, FUNCTIONS) and _first_parameter(value.scope) == value.name:
                    found |= {cls, *(each for each in self._classes if cls in self._bases(each))}
                elif value.kind == "class" and isinstance(value.node, ast.ClassDef):
                    found.add(value.node)
                else:
                    found.add(UNKNOWN)
            elif isinstance(value, ast.Call):
                made = {each for each in self.values(value.func) if isinstance(each, Definition) and each.kind == "class"}
                found |= {each.node for each in made if isinstance(each.node, ast.ClassDef)} or {UNKNOWN}
                if isinstance(value.func, ast.Name) and value.func.id == "super":
                    cls = self.cls(value)
                    found = (found - {UNKNOWN}) | set(self._bases(cls) if cls is not None else ())
            elif isinstance(value, ast.Attribute):
                held = [write.value for write in self.writes(value.attr) if write.value is not None]
                found |= {each for written in held if isinstance(written, ast.Call) for each in self.classes(written)} or {UNKNOWN}
            else:
                found.add(UNKNOWN)
        return found

    @cached_property
    def _classes(self) -> list[ast.ClassDef]:
        return [node for node in self.source.scopes if isinstance(node, ast.ClassDef)]

    @cached_property
    def _methods(self) -> dict[str, set[Function]]:
        found: dict[str, set[Function]] = {}
        for cls in self._classes:
            for node in cls.body:
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    found.setdefault(node.name, set()).add(node)
        return found

    def _bases(self, cls: ast.ClassDef) -> list[ast.ClassDef]:
        """The classes of the file that a class inherits from, the nearest first."""
        found: dict[ast.ClassDef, None] = {}
        pending = [cls]
        while pending:
            for base in pending.pop(0).bases:
                for value in self.values(base):
                    node = value.node if isinstance(value, Definition) and value.kind == "class" else None
                    if isinstance(node, ast.ClassDef) and node not in found and node is not cls:
                        found.setdefault(node)
                        pending.append(node)
        return list(found)

    def _method(self, cls: ast.ClassDef, name: str) -> set[Function | Definition]:
        for each in (cls, *self._bases(cls)):
            methods: set[Function | Definition] = {n for n in each.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and n.name == name}  # fmt: skip  # noqa: E501
            if methods:
                return methods
        return set()

    @cached_property
    def _callers(self) -> dict[ast.AST, list[ast.Call]]:
        found: dict[ast.AST, list[ast.Call]] = {}
        for call in self._calls:
            for callee in self.callees(call):
                if isinstance(callee, FUNCTIONS):
                    found.setdefault(callee, []).append(call)
        return found

    def callers(self, function: Function) -> list[ast.Call]:
        """The calls in the file that can run a function, in source order."""
        return self._callers.get(function, [])

    def bind(self, call: ast.Call, function: Function) -> dict[str, ast.expr | Definition | None]:
        """What each parameter of a function gets from a call: an expression (of the call, or the default), None where nothing is given,
        `UNKNOWN` where a starred argument may give it. `*args` gets a tuple of the call's own expressions."""
        arguments = function.args
        positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        bound: dict[str, ast.expr | Definition | None] = {each.arg: default_of(function, each.arg) for each in arguments_of(function)}
        given: list[ast.expr] = list(call.args)
        words: list[ast.keyword] = list(call.keywords)
        for value in self.values(call.func):
            if isinstance(value, ast.Call) and self._is_partial(value):
                given, words = [*value.args[1:], *given], [*value.keywords, *words]
        if self._first_is_bound(call, function) and positional:
            receiver = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr != "apply" else None
            bound[positional[0]] = receiver if receiver is not None and not _is_super(receiver) else UNKNOWN
            positional = positional[1:]
        starred = next((i for i, each in enumerate(given) if isinstance(each, ast.Starred)), None)
        for i, name in enumerate(positional):
            if starred is not None and i >= starred:
                bound[name] = UNKNOWN
            elif i < len(given):
                bound[name] = given[i]
        if arguments.vararg is not None:
            rest = given[len(positional) :]
            bound[arguments.vararg.arg] = UNKNOWN if starred is not None else ast.Tuple(rest, ast.Load())
        names = {each.arg for each in (*arguments.args, *arguments.kwonlyargs)}
        for word in words:
            if word.arg in names:
                bound[word.arg] = word.value
            elif word.arg is None:
                taken = {each.arg for each in words} | set(positional[: len(given)])
                bound.update(dict.fromkeys(names - taken, UNKNOWN))
        if arguments.kwarg is not None:
            bound[arguments.kwarg.arg] = UNKNOWN
        return bound

    def keywords(self, call: ast.Call) -> dict[str, ast.expr]:
        """What a call gives by name, also by `**settings` of a dict that the file shows."""
        found: dict[str, ast.expr] = {}
        for word in call.keywords:
            value = only(self.values(word.value)) if word.arg is None else None
            if word.arg is not None:
                found[word.arg] = word.value
            elif isinstance(value, ast.Dict):
                shown = zip(value.keys, value.values, strict=True)
                found.update((key.value, each) for key, each in shown if isinstance(key, ast.Constant) and isinstance(key.value, str))
            elif isinstance(value, ast.Call) and self.names_of(value.func) == {"dict"}:
                found.update((each.arg, each.value) for each in value.keywords if each.arg is not None)
        return found

    def given(self, call: ast.Call, function: Function, name: str) -> ast.expr | None:
        """What a call itself gives for a parameter of a function, of this file or another; None where nothing, or what is not known."""
        value = self.bind(call, function).get(name)
        return value if isinstance(value, ast.expr) and value is not default_of(function, name) else None

    def _first_is_bound(self, call: ast.Call, function: Function) -> bool:
        """Whether a call hands the function's first parameter over by itself: of a method, unless it is called on its class, and of
        the forward of a custom Function, which `apply` gives a context."""
        positional = [*function.args.posonlyargs, *function.args.args]
        if isinstance(function, ast.Lambda) or not positional:
            return False
        if function.name == "forward" and isinstance(call.func, ast.Attribute) and call.func.attr == "apply":
            return positional[0].arg == "ctx" or len(positional) == len(call.args) + 1
        if function not in self.source.parents:
            return positional[0].arg in ("self", "cls")
        if not isinstance(self.source.parents[function], ast.ClassDef) or any(dotted(e) == "staticmethod" for e in function.decorator_list):
            return False
        if isinstance(call.func, ast.Attribute) and not any(dotted(each) == "classmethod" for each in function.decorator_list):
            owners = self.values(call.func.value)
            return not all(isinstance(each, Definition) and each.kind == "class" for each in owners)
        return True

    def returns(self, function: Function) -> list[ast.expr]:
        """What a function can return, in source order; of a generator, what it yields."""
        if isinstance(function, ast.Lambda):
            return [function.body]
        found = [
            node.value
            for node in _own_nodes(function, inside=True)
            if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)) and node.value is not None
        ]
        return sorted(found, key=_place)

    def origins(self, statement: ast.stmt, name: str, depth: int = 3) -> set[ast.stmt]:
        """The statements that bind the value which a statement gives a name: the statement itself, or, where the value is what a function
        of the file returns, the statements of that function that bind what it returns.

        Objects that are called (a module's forward) are not looked into; nor is a call that can run what is not in the file.
        """
        found: set[ast.stmt] = set()
        pending = [(statement, name, depth)]
        seen: set[tuple[ast.stmt, str]] = set()
        while pending:
            current, written, left = pending.pop()
            if (current, written) in seen:
                continue
            seen.add((current, written))
            inner = self._returned(current, written) if left else None
            if inner is None:
                found.add(current)
            else:
                pending += [(each, inside, left - 1) for each, inside in inner]
        return found

    def _returned(self, statement: ast.stmt, name: str) -> list[tuple[ast.stmt, str]] | None:
        """The statements, with the names they bind, that give what a call returns for a name; None where it is not just such a call."""
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or not isinstance(statement.value, ast.Call):
            return None
        paths = [path for target in _targets(statement) for path in _paths(target, name)]
        callees = self.callees(statement.value)
        if len(paths) != 1 or not callees or any(not isinstance(each, ast.FunctionDef) or each.name in _OF_OBJECTS for each in callees):
            return None
        found: list[tuple[ast.stmt, str]] = []
        for callee in callees:
            assert isinstance(callee, ast.FunctionDef)
            for value in self.returns(callee):
                item: ast.expr | None = value
                for index in paths[0]:
                    item = item.elts[index] if isinstance(item, ast.Tuple) and index < len(item.elts) else None
                bound = self._binding(item) if item is not None else None
                returning = self.source.statement(value)
                if bound is None or returning is None:
                    return None
                found += bound or [(returning, "")]
        return found or None

    def _binding(self, expr: ast.expr) -> list[tuple[ast.stmt, str]] | None:
        """The statements that bind a name where it is read; none for what is no name, None where it may be bound by no statement."""
        if not isinstance(expr, ast.Name):
            return []
        found: list[tuple[ast.stmt, str]] = []
        for definition in self.reaching(expr):
            statement = self.source.statement(definition.node)
            if definition.kind not in ("assign", "augmented") or statement is None:
                return None
            found.append((statement, expr.id))
        return found or None

    def may_run(self, expr: ast.AST, depth: int = 4) -> set[Function | Definition]:
        """The functions of the file that computing an expression can run, with `UNKNOWN` where it can run others."""
        found: set[Function | Definition] = set()
        pending = [(expr, depth)]
        while pending:
            current, left = pending.pop()
            for node in ast.walk(current):
                for callee in self.callees(node) if isinstance(node, ast.Call) else ():
                    if callee not in found:
                        found.add(callee)
                        if isinstance(callee, FUNCTIONS) and left:
                            pending.append((callee, left - 1))
        return found

    # Attributes and containers

    def writes(self, attribute: str, value: object = UNKNOWN) -> list[Write]:
        """The places that write an attribute, of whatever object, in source order: assignments, `setattr`, `vars(x)[...]`, `add_module`
        and `register_buffer`, and the method `attribute_(value)` (`requires_grad_`). With a value, those alone that can write this
        constant."""
        found = self._writes.get(attribute, [])
        if value is UNKNOWN:
            return found
        return [write for write in found if write.value is None or self.can_be(write.value, value)]

    @cached_property
    def _writes(self) -> dict[str, list[Write]]:
        found: dict[str, list[Write]] = {}
        for node in self.source.parents:
            if isinstance(node, ast.stmt):
                for target, value in assigned(node):
                    if isinstance(target, ast.Attribute):
                        found.setdefault(target.attr, []).append(Write(node, target.value, value))
                    elif isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) and (owner := _dict_of(target.value)):
                        found.setdefault(str(target.slice.value), []).append(Write(node, owner, value))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr" and len(node.args) == 3:
                for name in self._constants(node.args[1]):
                    found.setdefault(str(name), []).append(Write(node, node.args[0], node.args[2]))
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in _REGISTERING
                and len(node.args) > 1
            ):
                for name in self._constants(node.args[0]):
                    found.setdefault(str(name), []).append(Write(node, node.func.value, node.args[1]))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_") and not node.func.attr.endswith("__"):  # fmt: skip  # noqa: E501
                given = node.args[0] if node.args else node.keywords[0].value if node.keywords else ast.Constant(True)
                found.setdefault(node.func.attr[:-1], []).append(Write(node, node.func.value, given))
        for writes in found.values():
            writes.sort(key=lambda write: _place(write.node))
        return found

    def attribute_reads(self, attribute: str) -> list[ast.Attribute]:
        """The places that read an attribute, of whatever object, in source order."""
        return self._attribute_reads.get(attribute, [])

    @cached_property
    def _attribute_reads(self) -> dict[str, list[ast.Attribute]]:
        found: dict[str, list[ast.Attribute]] = {}
        for node in self.source.parents:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.setdefault(node.attr, []).append(node)
        for nodes in found.values():
            nodes.sort(key=_place)
        return found

    def _constants(self, expr: ast.expr) -> set[object]:
        return {value.value for value in self.values(expr) if isinstance(value, ast.Constant)}

    def can_be(self, expr: ast.expr, value: object) -> bool:
        """Whether an expression can have a constant value; what is not known can."""
        for each in self.values(expr):
            if not isinstance(each, ast.Constant) or (type(each.value) is type(value) and each.value == value):
                return True
        return False

    def _named(self) -> dict[str, list[ast.expr]]:
        found: dict[str, list[ast.expr]] = {}
        for node in self.source.parents:
            if isinstance(node, (ast.Name, ast.Attribute)) and (name := dotted(node)) is not None:
                found.setdefault(name, []).append(node)
        for nodes in found.values():
            nodes.sort(key=_place)
        return found

    def item_writes(self, key: str) -> list[tuple[ast.stmt, ast.expr | None]]:
        """The places that write an item with this constant key, of whatever container, and what they write, where that is one thing."""
        return self._item_writes.get(key, [])

    @cached_property
    def _item_writes(self) -> dict[object, list[tuple[ast.stmt, ast.expr | None]]]:
        found: dict[object, list[tuple[ast.stmt, ast.expr | None]]] = {}
        for node in self.source.parents:
            if isinstance(node, ast.stmt):
                for target, value in assigned(node):
                    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
                        found.setdefault(target.slice.value, []).append((node, value))
        for writes in found.values():
            writes.sort(key=lambda write: _place(write[0]))
        return found

    def grows(self, name: str, within: ast.AST | None = None) -> list[Growth]:
        """The places that put something into a container by its name, in source order: methods (also by another name, `push = xs.append`),
        `xs[k] = v`, `xs += [...]`, `xs = xs + [...]`, `xs = [*xs, v]`, `heappush(xs, v)`; also what is put into a container
        in it (`xs[k].append(v)`). With a node, those alone that stand in it."""
        found = self._growths.get(name, [])
        return found if within is None else [growth for growth in found if self.source.stands_in(growth.node, within)]

    def grows_in(self, attribute: str) -> list[Growth]:
        """The same for an attribute (`kept` of `self.kept` and `owner.kept`), or a variable of that name."""
        found = [growth for owner, growths in self._growths.items() if owner.rpartition(".")[2] == attribute for growth in growths]
        return sorted(found, key=lambda growth: _place(growth.node))

    @cached_property
    def _growths(self) -> dict[str, list[Growth]]:
        found: dict[str, list[Growth]] = {}
        for call in self._calls:
            for called in self.values(call.func):
                if isinstance(called, ast.Attribute) and called.attr in GROWING_METHODS and (owner := _holder(called.value)):
                    found.setdefault(owner, []).append(Growth(call, (*call.args, *(word.value for word in call.keywords))))
            if call.args and (owner := _holder(call.args[0])) and self.names_of(call.func) & _GROWING_CALLS:
                found.setdefault(owner, []).append(Growth(call, tuple(call.args[1:])))
        for node in self.source.parents:
            if not isinstance(node, ast.stmt):
                continue
            for target, value in assigned(node):
                holder = _holder(target.value) if isinstance(target, ast.Subscript) else None
                put = node.value if isinstance(node, ast.AugAssign) else value
                if holder is not None:
                    found.setdefault(holder, []).append(Growth(node, (put,) if put is not None else ()))
            name, added = _rebuilt(node)
            if name is not None:
                found.setdefault(name, []).append(Growth(node, added))
        for growths in found.values():
            growths.sort(key=lambda growth: _place(growth.node))
        return found


def _holder(node: ast.expr) -> str | None:
    """`self.kept` of `self.kept`, `self.kept[name]`, `self.kept.setdefault(name, [])` and the like."""
    while True:
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("setdefault", "get"):
            node = node.func.value
        else:
            return dotted(node)


def _targets(statement: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return statement.targets if isinstance(statement, ast.Assign) else [statement.target]


def _paths(target: ast.expr, name: str) -> Iterator[tuple[int, ...]]:
    """Which items of a value a target gives to a name; none where a star makes that uncertain."""
    if dotted(target) == name:
        yield ()
    elif isinstance(target, (ast.Tuple, ast.List)) and not any(isinstance(each, ast.Starred) for each in target.elts):
        for i, each in enumerate(target.elts):
            yield from ((i, *path) for path in _paths(each, name))


def _rebuilt(node: ast.stmt) -> tuple[str | None, tuple[ast.expr, ...]]:
    """The container that a statement makes longer by an operator or by writing it anew, and what comes to it."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Add, ast.BitOr)) and _is_display(node.value):
        return dotted(node.target), (node.value,)
    if not isinstance(node, ast.Assign) or len(node.targets) != 1 or (name := dotted(node.targets[0])) is None:
        return None, ()
    value = node.value
    if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Add, ast.BitOr)):
        for kept, added in ((value.left, value.right), (value.right, value.left)):
            if dotted(kept) == name and _is_display(added):
                return name, (added,)
    if isinstance(value, (ast.List, ast.Tuple, ast.Set)):
        kept_in = [each for each in value.elts if isinstance(each, ast.Starred) and dotted(each.value) == name]
        if kept_in:
            return name, tuple(each for each in value.elts if each not in kept_in)
    if isinstance(value, ast.Dict) and any(k is None and dotted(v) == name for k, v in zip(value.keys, value.values, strict=True)):
        return name, tuple(v for k, v in zip(value.keys, value.values, strict=True) if k is not None)
    return None, ()


def _is_display(node: ast.expr) -> bool:
    return isinstance(node, (ast.List, ast.Tuple, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp))


def assigned(node: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """The single targets of a statement and what each gets, where that is one expression."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _paired(target, node.value)
    elif isinstance(node, ast.AnnAssign):
        if node.value is not None:
            yield node.target, node.value
    else:
        yield from ((target, None) for target in targets_of(node))


def _paired(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if not isinstance(target, (ast.Tuple, ast.List)):
        yield (target.value, None) if isinstance(target, ast.Starred) else (target, value)
        return
    items: Iterable[ast.expr | None] = [None] * len(target.elts)
    if (
        isinstance(value, (ast.Tuple, ast.List))
        and len(value.elts) == len(target.elts)
        and not any(isinstance(each, ast.Starred) for each in (*value.elts, *target.elts))
    ):
        items = value.elts
    for each, item in zip(target.elts, items, strict=True):
        yield from _paired(each, item)


def _dict_of(node: ast.expr) -> ast.expr | None:
    """The object whose attribute dict an expression is: `vars(x)`, `x.__dict__`."""
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "vars" and len(node.args) == 1:
        return node.args[0]
    return None


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _first_parameter(function: Function) -> str | None:
    positional = [*function.args.posonlyargs, *function.args.args]
    if isinstance(function, ast.Lambda) or not positional:
        return None
    return None if any(dotted(each) == "staticmethod" for each in function.decorator_list) else positional[0].arg


def _own_nodes(node: ast.AST, *, inside: bool = False) -> Iterator[ast.AST]:
    """A statement's nodes without the bodies of functions and classes in it (of a function: its own body)."""
    pending: list[ast.AST] = list(getattr(node, "body", ())) if inside else [node]
    while pending:
        current = pending.pop()
        yield current
        if isinstance(current, (*FUNCTIONS, ast.ClassDef)):
            continue
        pending.extend(ast.iter_child_nodes(current))


def _place(node: ast.AST) -> tuple[int, int, int]:
    return (getattr(node, "lineno", 0), getattr(node, "col_offset", 0), -(getattr(node, "end_col_offset", 0) or 0))


_programs: dict[str, Program] = {}


def programs_of(sources: Iterable[Source]) -> list[Program]:
    """The programs of files, without those that could not be parsed."""
    return [program for source in sources if (program := program_of(source)) is not None]


def calls_in(sources: Iterable[Source], *names: str) -> list[tuple[Source, ast.Call]]:
    """The calls of what has one of these names, in several files (see `Program.calls`)."""
    return [(program.source, call) for program in programs_of(sources) for call in program.calls(*names)]


def writes_in(sources: Iterable[Source], attribute: str) -> list[tuple[Source, Write]]:
    """The places that write an attribute, in several files (see `Program.writes`)."""
    found = (program for program in programs_of(sources) if program.mentions(attribute))
    return [(program.source, write) for program in found for write in program.writes(attribute)]


def program_of(source: Source | str | None) -> Program | None:
    """The program of a file (or of its source), made once for a given text; None when there is no text to be had."""
    found = load(source) if isinstance(source, str) else source
    if found is None or found.tree is None:
        return None
    known = _programs.get(found.filename)
    if known is None or known.source is not found:
        while len(_programs) >= _MAX_FILES:
            _programs.pop(next(iter(_programs)), None)
        known = _programs[found.filename] = Program(found)
    return known
