"""Where a value goes: the statements that drop it, whether its function returns it, whether anything may read it.

    destination(program, expression)
    dropped_by(stack)                    the same across the functions that ran

A name that the value is bound to is followed to every read that the definition reaches, a container that it is put into to every read
of its items, an argument into the functions of the file that the call can run. An operation, an attribute and a call that is not known
read it; what is not known reads it, too.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

from gradguard.analysis.places.source import ResolvedSite, at_line, resolve
from gradguard.analysis.program.index import GROWING_METHODS, UNKNOWN, Program, program_of
from gradguard.analysis.program.syntax import COMPREHENSIONS, FUNCTIONS
from gradguard.core.callsite import CallSite

_HANDING_ON = frozenset({
    "list", "tuple", "set", "dict", "iter", "next", "zip", "enumerate", "reversed", "map", "filter", "collections.OrderedDict",
    "collections.deque", "itertools.chain", "itertools.starmap", "itertools.islice",
})  # fmt: skip
_GOING_OVER = frozenset({"list", "tuple", "set", "len", "sorted", "iter", "zip", "enumerate", "reversed"})
_MAPPINGS = frozenset({"dict", "OrderedDict", "defaultdict", "state_dict"})
_CONTAINERS = frozenset({"list", "dict", "set", "collections.OrderedDict", "collections.defaultdict", "collections.deque"})
_ITEM_METHODS = frozenset({"items", "values", "get", "pop", "popitem", "popleft", "copy", "__getitem__", "__next__"})
_OTHER_METHODS = frozenset({"keys", "clear", *GROWING_METHODS})
_MOST = 400  # expressions followed


@dataclass
class Destination:
    """Where a value goes.

    Attributes:
        dropped: the statements after which nothing has it any more: they bind a name that nothing reads, or bind none.
        returned: whether the function gives it to its caller.
        read: whether anything may look at it, or keep it.
    """

    dropped: list[ast.stmt] = field(default_factory=list)
    returned: bool = False
    read: bool = False


def destination(program: Program, expression: ast.AST, ran: ast.stmt | None = None) -> Destination:
    """Where the value of an expression goes, within the file.

    Args:
        program: the file.
        expression: what gives the value.
        ran: a statement that is known not to have read it.
    """
    walk = _Walk(program, ran)
    walk.value(expression)
    return walk.found


def dropped_by(stack: Sequence[CallSite]) -> ResolvedSite | None:
    """The statement that drops a value which nothing can read; None where something can, or where that is not known.

    Args:
        stack: where the value was computed, and the frames that called each other for it, innermost first.
    """
    inside: ast.AST | None = None
    for site in stack:
        place = resolve(site)
        program = None if place is None else program_of(place.file)
        if place is None or program is None or place.statement is None:
            return None
        function = place.enclosing_function
        if inside is not None and function is inside:
            continue  # the frame around a comprehension's: its statement was followed already
        found = destination(program, _value(place.statement) if place.node is None else place.node, place.statement)
        if found.read or not (found.dropped or found.returned):
            return None
        if not found.returned:
            own = place.statement if place.statement in found.dropped else found.dropped[-1]
            return place if own is place.statement else at_line(place.file, own.lineno)
        inside = function
    return None


def _value(statement: ast.stmt) -> ast.AST:
    value = getattr(statement, "value", None)
    return value if isinstance(value, ast.AST) else statement


class _Walk:
    def __init__(self, program: Program, ran: ast.stmt | None) -> None:
        self.program = program
        self.ran = ran
        self.found = Destination()
        self.seen: set[ast.AST] = set()

    def value(self, node: ast.AST) -> None:
        """Goes from an expression to what stands around it."""
        if node in self.seen or self.found.read:
            return
        self.seen.add(node)
        above = self.program.source.parents.get(node)
        if above is None or len(self.seen) > _MOST:
            self.found.read = True
        elif isinstance(above, ast.Expr):
            self.found.dropped.append(above)
        elif isinstance(above, (ast.Return, ast.Yield, ast.YieldFrom, ast.Lambda)):
            self.found.returned = True
        elif isinstance(above, (ast.Assign, ast.AnnAssign)):
            for target in above.targets if isinstance(above, ast.Assign) else [above.target]:
                self.bound(target, above)
        elif isinstance(above, (ast.Tuple, ast.List)) and (paired := self._paired(above, node)) is not None:
            self.bound(paired, self.program.source.statement(above))
        elif isinstance(above, ast.NamedExpr):
            self.bound(above.target, self.program.source.statement(above))
            self.value(above)
        elif isinstance(above, (ast.For, ast.AsyncFor, ast.comprehension)) and node is above.iter:
            self.bound(above.target, above if isinstance(above, ast.stmt) else self.program.source.statement(above))
        elif isinstance(above, (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Starred)) or _gives(above, node):
            self.value(above)
        elif isinstance(above, ast.Subscript) and node is above.value:
            if isinstance(above.ctx, ast.Load):
                self.value(above)
        elif isinstance(above, ast.Attribute) and above.attr in _ITEM_METHODS | _OTHER_METHODS:
            call = self.program.source.parents.get(above)
            if above.attr in _ITEM_METHODS:
                self.value(call if isinstance(call, ast.Call) else above)
        elif isinstance(above, ast.keyword) or (isinstance(above, ast.Call) and node is not above.func):
            call = above if isinstance(above, ast.Call) else self.program.source.parents.get(above)
            if isinstance(call, ast.Call):
                self.argument(node, call)
            else:
                self.found.read = True
        elif not (isinstance(above, ast.Delete) or _asks_for_a_key(above, node) or self.program.source.statement(node) is self.ran):
            self.found.read = True

    def _paired(self, items: ast.Tuple | ast.List, node: ast.AST) -> ast.expr | None:
        """What one of several values is assigned to: `a` of `a, b = node, c`."""
        statement = self.program.source.parents.get(items)
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        pair = targets[0] if len(targets) == 1 and isinstance(targets[0], (ast.Tuple, ast.List)) else None
        if pair is None or len(pair.elts) != len(items.elts) or any(isinstance(each, ast.Starred) for each in (*pair.elts, *items.elts)):
            return None
        return pair.elts[[each is node for each in items.elts].index(True)]

    def bound(self, target: ast.expr, statement: ast.stmt | None) -> None:
        """The value, or what it is an item of, is bound to a target."""
        if isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self.bound(each.value if isinstance(each, ast.Starred) else each, statement)
        elif isinstance(target, ast.Name):
            reads = [read for definition in self.program.defined_by(target) for read in self.program.uses(definition)]
            if not reads and statement is not None:
                self.found.dropped.append(statement)
            for read in reads:
                self.value(read)
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            self.put_into(target.value, statement)
        else:
            self.found.read = True

    def put_into(self, container: ast.Name, statement: ast.stmt | None) -> None:
        """The value has become an item of a container."""
        definitions = self.program.reaching(container)
        if not definitions or any(each.kind != "assign" or each.path or not self._fresh(each.value) for each in definitions):
            self.found.read = True  # others may have the container as well
            return
        if statement is not None:
            self.found.dropped.append(statement)
        keys = all(_is_mapping(self.program, each.value) for each in definitions)
        for read in (read for definition in definitions for read in self.program.uses(definition)):
            if not (keys and self._goes_over(read)):
                self.value(read)

    def _goes_over(self, read: ast.expr) -> bool:
        """Whether it is what a loop or a built-in function iterates over: of a mapping that gives keys."""
        above = self.program.source.parents.get(read)
        if isinstance(above, ast.Call):
            return read in above.args and self.program.names_of(above.func) <= _GOING_OVER
        return isinstance(above, (ast.For, ast.AsyncFor, ast.comprehension)) and read is above.iter

    def _fresh(self, value: ast.expr | None) -> bool:
        """Whether an expression makes a container that nothing else has."""
        if isinstance(value, ast.Call):
            names = self.program.names_of(value.func)
            return bool(names) and all(name.rpartition(".")[2] == "state_dict" or name in _CONTAINERS for name in names)
        return isinstance(value, (ast.List, ast.Dict, ast.Set, *COMPREHENSIONS))

    def argument(self, node: ast.AST, call: ast.Call) -> None:
        """The value is handed to a call."""
        names, function = self.program.names_of(call.func), call.func
        if names and names <= _HANDING_ON:
            self.value(call)
            return
        if isinstance(function, ast.Attribute) and function.attr in GROWING_METHODS and isinstance(function.value, ast.Name):
            self.put_into(function.value, self.program.source.statement(call))
            return
        for callee in self.program.callees(call) or {UNKNOWN}:
            if not isinstance(callee, FUNCTIONS):
                self.found.read = True
                return
            for name, given in self.program.bind(call, callee).items():
                if given is node:
                    for read in (read for each in self.program.definitions(name, callee) for read in self.program.uses(each)):
                        self.value(read)


def _is_mapping(program: Program, value: ast.expr | None) -> bool:
    names = program.names_of(value.func) if isinstance(value, ast.Call) else set()
    return isinstance(value, (ast.Dict, ast.DictComp)) or (bool(names) and {name.rpartition(".")[2] for name in names} <= _MAPPINGS)


def _gives(above: ast.AST, node: ast.AST) -> bool:
    """Whether an expression has a part of it as its value, or as an item."""
    if isinstance(above, COMPREHENSIONS):
        return node in (getattr(above, "elt", None), getattr(above, "value", None))
    return isinstance(above, ast.IfExp) and node is not above.test


def _asks_for_a_key(above: ast.AST, node: ast.AST) -> bool:
    return isinstance(above, ast.Compare) and node is not above.left and isinstance(above.ops[0], (ast.In, ast.NotIn))
