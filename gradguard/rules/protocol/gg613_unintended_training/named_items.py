"""What expressions are worth for one item of a module's named parameters, worked out without running any of the user's code. Part of GG613.

However a program goes over `named_parameters()` (a loop, `next`, a comprehension, `filter`, a function that is called for each), every name
leads by its definition to an expression, and in the end to an item: a name and a parameter. Which item that is can be chosen here, and its
name be another than it has.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.interpreter import Interpreter, UnknownError
from gradguard.analysis.program.index import UNKNOWN, Definition, Program, Write, only, program_of
from gradguard.analysis.program.syntax import FUNCTIONS, Function, Source
from gradguard.core.safe_read import UNKNOWN as NOT_READ
from gradguard.core.safe_read import (
    class_attributes,
    elements,
    function_code,
    modules_in,
    named_modules,
    named_parameters,
    namespace,
    variables_of,
)

_LISTINGS: dict[str, Callable[[nn.Module], Iterable[tuple[str, Any]]]] = {
    "named_parameters": named_parameters,
    "named_modules": named_modules,
}
_SAME_ITEMS = frozenset({"list", "tuple", "iter", "reversed", "dict", "sorted", "collections.OrderedDict"})
_PLAIN = (str, int, float, bool, type(None))
_DEPTH = 5  # calls, from where a parameter is frozen outwards
_MOST_TURNS = 64  # of other loops around the place


class Skipped(Exception):
    """The item chosen does not get there."""


class Decided(NamedTuple):
    """An expression that has decided what becomes of an item, and how.

    Attributes:
        turn: of other loops around the place.
    """

    program: Program
    node: ast.expr
    truth: bool
    turn: int


class Items:
    """Works out what happens to one item.

    Args:
        incident: whose frames have variables.
        sources: the files in which calls of a function are looked for.

    Attributes:
        item: the item chosen, a name and what it stands for.
        listing: the module whose items they are, and the method that gives them; known once an item was asked for.
        over: the call of that method, as written.
        trail: the conditions that were worked out for the item.
    """

    def __init__(self, incident: Incident, sources: list[Source]) -> None:
        self._frames = [view.frame for view in incident.user_frames]
        self._programs = [program for source in sources if (program := program_of(source)) is not None]
        self._modules = [value for _, value in incident.names.bindings if isinstance(value, nn.Module)]
        self.item: tuple[str, Any] = ("", None)
        self.listing: tuple[nn.Module, str] | None = None
        self.over = ""
        self.trail: list[Decided] = []
        self._calls: dict[ast.AST, tuple[Program, ast.Call]] = {}  # by which a function was entered
        self._turn = 0
        self._turns: dict[ast.AST, Any] = {}  # what other loops around the place are at
        self._depth = 0
        self._known: dict[tuple[str, ast.AST | None], Any] = {}  # answers that are the same for every item

    def _once(self, question: str, node: ast.AST | None, ask: Callable[[], Any]) -> Any:
        key = (question, node)
        if key not in self._known:
            self._known[key] = ask()
        return self._known[key]

    def names_of(self, program: Program, function: ast.expr) -> set[str]:
        """The names of what is called."""
        found: set[str] = self._once("names", function, lambda: program.names_of(function))
        return found

    def callee(self, program: Program, call: ast.Call) -> Function | None:
        """The one function of the file that a call runs."""
        found = self._once("callee", call, lambda: only(program.callees(call)))
        return found if isinstance(found, FUNCTIONS) else None

    def named(self, program: Program, write: Write) -> list[tuple[str, Any]]:
        """Every item that a place goes over.

        Raises:
            UnknownError: that cannot be told.
        """
        try:
            self.frozen(program, write, ("", None))
        except UnknownError:
            pass  # once the listing is known, items can be asked about
        if self.listing is None:
            raise UnknownError
        return [(name, thing) for name, thing in _LISTINGS[self.listing[1]](self.listing[0]) if name]

    def frozen(self, program: Program, write: Write, item: tuple[str, Any]) -> list[Any]:
        """What a place freezes when it is reached with this item.

        Raises:
            UnknownError: that cannot be told.
        """
        self.item, self.trail, self._turns, found = item, [], {}, dict[int, Any]()
        for number, turns in enumerate(self._every_turn(program, write.node)):
            self._turn, self._turns = number, turns
            try:
                if self._reached(program, write.node) and self._off(program, write):
                    thing = self.value(program, write.owner) if write.owner is not None else None
                    found[id(thing)] = thing
            except Skipped:
                continue
        return list(found.values())

    def _off(self, program: Program, write: Write) -> bool:
        if write.value is None:
            raise UnknownError
        return isinstance(write.value, ast.Constant) or not self.decide(program, write.value)

    def decide(self, program: Program, test: ast.expr) -> bool:
        """Whether a condition holds."""
        truth = Interpreter({}).true(self.value(program, test))
        self.trail.append(Decided(program, test, truth, self._turn))
        return truth

    def _every_turn(self, program: Program, node: ast.AST) -> Iterator[dict[ast.AST, Any]]:
        """The items of loops around a place that do not go over what is named: `for prefix in prefixes`."""
        others: dict[ast.AST, list[Any]] = {}
        for loop in self._once("loops", node, lambda: program.loops(node)):
            if isinstance(loop, (ast.For, ast.comprehension)):
                try:
                    self._element(program, loop.iter)
                except Skipped:
                    continue
                except UnknownError:
                    others[loop.iter] = list(Interpreter({}).items(self.value(program, loop.iter)))
        turns = list(product(*others.values()))
        if len(turns) > _MOST_TURNS:
            raise UnknownError
        yield from (dict(zip(others, turn, strict=True)) for turn in turns)

    def _reached(self, program: Program, node: ast.AST) -> bool:
        """Whether all conditions hold under which a place runs, those of the calls that lead to it included."""
        self._calls = {}
        path: list[tuple[Program, ast.AST]] = [(program, node)]
        while (function := path[-1][0].function(path[-1][1])) is not None:
            if len(path) > _DEPTH:
                raise UnknownError
            call = self._only_call(path[-1][0], function)
            self._calls[function] = call
            path.append(call)
        for where, place in reversed(path):
            if any(isinstance(above, ast.ExceptHandler) for above in where.source.ancestors(place)):
                raise UnknownError
            for loop in self._once("loops", place, partial(where.loops, place)):
                if isinstance(loop, (ast.For, ast.comprehension)) and loop.iter not in self._turns:
                    self._element(where, loop.iter)
            for condition in reversed(self._once("conditions", place, partial(where.conditions, place))):
                if self.decide(where, condition.test) is not condition.holds:
                    return False
        return True

    def _only_call(self, program: Program, function: Function) -> tuple[Program, ast.Call]:
        known = program.callers(function)  # of those that can run it, one that can run nothing else is meant
        sure = [call for call in known if UNKNOWN not in program.callees(call)]
        calls: list[tuple[Program, ast.Call]] = [(program, call) for call in sure or known]
        if not calls and isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            around = program.cls(function)
            name = around.name if function.name == "__init__" and around is not None else function.name
            calls = [(each, call) for each in self._programs if each is not program for call in each.calls(name)]
        if len(calls) != 1:
            raise UnknownError
        return calls[0]

    # -- expressions --------------------------------------------------------------------------------------------------

    def value(self, program: Program, node: ast.expr) -> Any:
        """What an expression is worth for the item chosen."""
        self._depth += 1
        try:
            if self._depth > 40:
                raise UnknownError
            return _Expression(self, program).value(node)
        finally:
            self._depth -= 1

    def name(self, program: Program, node: ast.Name) -> Any:
        """What a name is worth where it is read."""
        definition = only(program.reaching(node))
        if definition is None or definition is UNKNOWN or definition.kind == "import":
            return self._once(node.id, None, lambda: self._alive(program, node.id, None))
        if definition.kind == "parameter":
            return self._argument(program, definition)
        if definition.value is None or definition.kind not in ("assign", "loop"):
            raise UnknownError
        loop = definition.kind == "loop"
        try:
            found = self._element(program, definition.value) if loop else self.value(program, definition.value)
        except UnknownError:
            if definition.path or program.loops(definition.node):  # what it holds now is the last item's
                raise
            return self._once(node.id, definition.scope, lambda: self._alive(program, node.id, definition.scope))
        for index in definition.path[1:] if loop else definition.path:  # that of a loop begins with the iteration
            if index is None or type(found) not in (tuple, list) or index >= len(found):
                raise UnknownError
            found = found[index]
        return found

    def _argument(self, program: Program, definition: Definition) -> Any:
        function = definition.scope
        if not isinstance(function, FUNCTIONS):
            raise UnknownError
        if definition.name == "self" and program.cls(function) is not None:
            return self._instance(program, program.cls(function))
        where, call = self._calls.get(function) or self._only_call(program, function)
        given = program.bind(call, function).get(definition.name)
        if not isinstance(given, ast.expr):
            raise UnknownError
        return self.value(program if given is definition.value else where, given)

    def _instance(self, program: Program, around: ast.ClassDef | None) -> nn.Module:
        """The one module of the class that a method belongs to."""
        file, name = program.source.filename, around.name if around is not None else ""
        found = {id(m): m for root in self._modules for m in modules_in(root) if _is_of(m, name, file)}
        module = only(list(found.values()))
        if module is None:
            raise UnknownError
        return module

    def _alive(self, program: Program, name: str, scope: ast.AST | None) -> Any:
        """What a variable holds now, which is bound once."""
        for frame in self._frames:
            if frame.f_code.co_filename == program.source.filename:
                inside = isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef))
                if inside and not (frame.f_code.co_name == scope.name and scope.lineno - 8 <= frame.f_code.co_firstlineno <= scope.lineno):  # type: ignore[union-attr]
                    continue
                if inside or scope is None or isinstance(scope, ast.Module):
                    return _still((variables_of(frame) if inside else namespace(frame.f_globals)).get(name, NOT_READ))
        raise UnknownError

    def _element(self, program: Program, node: ast.expr) -> Any:
        """The item chosen, as what an expression gives when it is gone over."""
        if node in self._turns:
            return self._turns[node]
        if isinstance(node, ast.Name):
            return self._element_of_name(program, node)
        if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)):
            for generator in node.generators:
                self._element(program, generator.iter)
                if not all(self.decide(program, test) for test in generator.ifs):
                    raise Skipped
            if isinstance(node, ast.DictComp):
                return self.value(program, node.key), self.value(program, node.value)
            return self.value(program, node.elt)
        if not isinstance(node, ast.Call):
            raise UnknownError
        method = only({value for value in program.values(node.func) if isinstance(value, ast.Attribute)})
        if isinstance(method, ast.Attribute) and not node.args and not node.keywords:
            if method.attr in _LISTINGS:
                return self._listed(program, method, node)
            if method.attr == "items":
                return self._element(program, method.value)
        names = self.names_of(program, node.func)
        if names == {"enumerate"} and node.args:
            return NOT_READ, self._element(program, node.args[0])
        if names == {"filter"} and len(node.args) == 2:
            element = self._element(program, node.args[1])
            if not self._keeps(program, node.args[0]):
                raise Skipped
            return element
        if names and names <= _SAME_ITEMS and node.args:
            return self._element(program, node.args[0])
        raise UnknownError

    def _element_of_name(self, program: Program, node: ast.Name) -> Any:
        definition = only(program.reaching(node))
        if definition is not None and definition.kind == "assign" and definition.value is not None and not definition.path:
            return self._element(program, definition.value)
        if definition is not None and definition.kind == "parameter" and isinstance(definition.scope, FUNCTIONS):
            where, call = self._calls.get(definition.scope) or self._only_call(program, definition.scope)
            given = program.bind(call, definition.scope).get(definition.name)
            if isinstance(given, ast.expr):
                return self._element(where, given)
        raise UnknownError

    def _listed(self, program: Program, method: ast.Attribute, call: ast.expr) -> tuple[str, Any]:
        module = self._once("module", call, lambda: self.value(program, method.value))
        if not isinstance(module, nn.Module) or (self.listing is not None and self.listing[0] is not module):
            raise UnknownError
        self.listing, self.over = (module, method.attr), program.source.segment(call) or f"{method.attr}()"
        return self.item

    def _keeps(self, program: Program, function: ast.expr) -> bool:
        """Whether a filter's function keeps the item: of a lambda with one parameter, `pair`, of which `pair[0]` is read."""
        value = only(program.values(function))
        if not isinstance(value, ast.Lambda) or len(value.args.args) != 1:
            raise UnknownError
        expression = _Expression(self, program)
        expression.names[value.args.args[0].arg] = self.item
        truth = Interpreter({}).true(expression.value(value.body))
        self.trail.append(Decided(program, value.body, truth, self._turn))
        return truth

    def called(self, program: Program, call: ast.Call) -> Any:
        """What a call of a function of the file gives back, whose body is one `return`."""
        function = self.callee(program, call)
        given = [] if function is None else self._once("returns", function, lambda: program.returns(function))
        if function is None or len(given) != 1 or program.conditions(given[0]):
            raise UnknownError
        before = self._calls.get(function)
        self._calls[function] = (program, call)
        try:
            return self.value(program, given[0])
        finally:
            if before is None:
                del self._calls[function]
            else:
                self._calls[function] = before

    def next(self, program: Program, call: ast.Call) -> Any:
        """What `next(...)` gives."""
        return self._element(program, call.args[0])


class _Expression(Interpreter):
    """The interpreter of one expression, which asks for what names stand for."""

    def __init__(self, items: Items, program: Program) -> None:
        super().__init__({})
        self._items = items
        self._program = program

    def _name(self, node: ast.Name) -> Any:
        return self.names[node.id] if node.id in self.names else self._items.name(self._program, node)

    def value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.NamedExpr):
            return self.value(node.value)
        return super().value(node)

    def _call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Name) and node.func.id not in self.names:
            if self._items.names_of(self._program, node.func) == {"next"} and node.args:
                return self._items.next(self._program, node)
            if self._items.callee(self._program, node) is not None:
                return self._items.called(self._program, node)
        return super()._call(node)


def _is_of(module: nn.Module, name: str, file: str) -> bool:
    """Whether it is an object of the class of this name that stands in a file."""
    return any(
        kind.__name__ == name
        and any((code := function_code(v)) is not None and code.co_filename == file for v in class_attributes(kind).values())
        for kind in type(module).__mro__
    )


def _still(value: Any) -> Any:
    """What is read without running anything of the user's."""
    if type(value) in _PLAIN or isinstance(value, (nn.Module, SimpleNamespace, argparse.Namespace)):
        return value
    if type(value) in (tuple, list, set, frozenset) and all(type(item) in _PLAIN for item in elements(value)):
        return value
    raise UnknownError
