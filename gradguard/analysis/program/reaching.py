"""Reaching definitions: every place that can have given a variable the value that a read of it finds.

A structured data-flow analysis over one file. Branches join, loops run to a fixed point, an exception can leave a `try` body after
any of its bindings, a `finally` sees every way out. The body of a class and a comprehension run where they stand and see the variables
of that moment; the body of a function runs at some later time and sees every definition of an outer variable. What `global` and
`nonlocal` let another function write is added to every read.

The answers are sets that contain what can happen: `UNKNOWN` stands for a definition outside the file (a builtin, a star import).
Two limits: of context managers only `suppress` is taken to swallow exceptions, and `exec` and writes through `globals()` are not seen.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from gradguard.analysis.program.syntax import COMPREHENSIONS, FUNCTIONS, Source

Kind = Literal["assign", "augmented", "loop", "with", "parameter", "import", "function", "class", "except", "match", "unknown"]


@dataclass(frozen=True, eq=False, slots=True)
class Definition:
    """A place that binds a variable."""

    name: str
    kind: Kind
    node: ast.AST
    """The binding node: the target's Name, the `ast.arg`, the `ast.alias`, the `def` or `class` statement, the handler, the pattern."""
    value: ast.expr | None = None
    """What the value comes from: the right-hand side, the iterated expression, the context expression, a parameter's default."""
    path: tuple[int | None, ...] = ()
    """Which item of `value` is bound, outermost first; None for one that is not known (an iteration, a starred target)."""
    scope: ast.AST | None = None
    """The module, function, class or comprehension that owns the variable."""

    @property
    def line(self) -> int:
        return getattr(self.node, "lineno", 0)


UNKNOWN = Definition("", "unknown", ast.Module([], []))
_UNBOUND = Definition("", "unknown", ast.Module([], []))  # no definition yet: never given out
_ANY = Definition("", "unknown", ast.Module([], []))  # any definition that the owning scope has: never given out
_MISSING = Definition("", "unknown", ast.Module([], []))  # as it was when the flow began: unbound, or any of the owner's

Key = tuple[ast.AST, str]
Env = dict[Key, frozenset[Definition]]
_BUILTINS = frozenset(dir(builtins))


@dataclass(slots=True)
class _Names:
    """What a scope binds and declares."""

    parent: ast.AST | None
    bound: set[str] = field(default_factory=set)
    outer: dict[str, bool] = field(default_factory=dict)  # declared `global` (True) or `nonlocal` (False)


@dataclass(slots=True)
class _Read:
    chain: ast.AST
    key: Key
    found: set[Definition]


class Reaching:
    """The definitions of a file and which reads they reach."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.definitions: dict[Key, list[Definition]] = {}
        self.reads: dict[ast.expr, frozenset[Definition]] = {}
        self._scopes: dict[ast.AST, _Names] = {}
        self._made: dict[tuple[ast.AST, str], Definition] = {}
        self._chains: dict[Definition, ast.AST] = {}
        self._pending: dict[ast.expr, list[_Read]] = {}
        self._bodies: dict[ast.AST, None] = {}
        tree = source.tree
        if tree is None:
            return
        self._scopes[tree] = _Names(None)
        for statement in tree.body:
            self._declare(statement, tree)
        _Flow(self, tree).module(tree)
        done: set[ast.AST] = set()
        while len(done) < len(self._bodies):  # a body may have functions of its own
            for body in [body for body in self._bodies if body not in done]:
                done.add(body)
                _Flow(self, body).function(body)
        self._finish()

    def owner(self, name: str, scope: ast.AST) -> ast.AST | None:
        """The scope whose variable a name is when it is used in `scope`; None for what the file does not bind."""
        current: ast.AST | None = scope
        first = True
        while current is not None:
            names = self._scopes[current]
            declared = names.outer.get(name)
            if declared is True:
                return self.source.tree
            if declared is None and name in names.bound and (first or not isinstance(current, ast.ClassDef)):
                return current
            current, first = names.parent, False
        return None

    def _finish(self) -> None:
        for read, parts in self._pending.items():
            found: set[Definition] = set()
            for part in parts:
                found |= part.found
                every = self.definitions.get(part.key, [])
                if _ANY in part.found:
                    found.update(every)
                elif len(every) > 1:  # a call in between may have let another function write it
                    found.update(d for d in every if self._chains[d] not in (part.chain, self._home(part.key[0])))
            self.reads[read] = frozenset(found - {_UNBOUND, _ANY})
        self._pending.clear()

    def _home(self, scope: ast.AST) -> ast.AST:
        """The function or module whose code binds a scope's variables as it runs."""
        while isinstance(scope, (ast.ClassDef, *COMPREHENSIONS)):
            parent = self._scopes[scope].parent
            assert parent is not None
            scope = parent
        return scope

    # Which names each scope binds

    def _declare(self, node: ast.AST, scope: ast.AST) -> None:
        names = self._scopes[scope]
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load):
                names.bound.add(node.id)
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            self._declare_function(node, scope)
            return
        if isinstance(node, ast.ClassDef):
            names.bound.add(node.name)
            self._scopes[node] = _Names(scope)
            for part in (*node.decorator_list, *node.bases, *node.keywords):
                self._declare(part, scope)
            for statement in node.body:
                self._declare(statement, node)
            return
        if isinstance(node, COMPREHENSIONS):
            self._scopes[node] = _Names(scope)
            self._declare(node.generators[0].iter, scope)
            for i, generator in enumerate(node.generators):
                for part in (generator.target, *generator.ifs, *([generator.iter] if i else [])):
                    self._declare(part, node)
            for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
                self._declare(part, node)
            return
        if isinstance(node, ast.NamedExpr):
            home = scope
            while isinstance(home, COMPREHENSIONS):
                home = self._scopes[home].parent or home
            self._scopes[home].bound.add(node.target.id)
            self._declare(node.value, scope)
            return
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            for name in node.names:
                names.outer[name] = isinstance(node, ast.Global)
                if isinstance(node, ast.Global) and self.source.tree is not None:
                    self._scopes[self.source.tree].bound.add(name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.bound.update(_imported(alias) for alias in node.names if alias.name != "*")
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            names.bound.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            names.bound.add(node.rest)
        for child in ast.iter_child_nodes(node):
            self._declare(child, scope)

    def _declare_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, scope: ast.AST) -> None:
        inner = self._scopes[node] = _Names(scope)
        inner.bound.update(argument.arg for argument in arguments_of(node))
        for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)):
            self._declare(default, scope)
        if isinstance(node, ast.Lambda):
            self._declare(node.body, node)
            return
        self._scopes[scope].bound.add(node.name)
        for part in node.decorator_list:
            self._declare(part, scope)
        for statement in node.body:
            self._declare(statement, node)

    # What the flow through a scope reports

    def define(self, chain: ast.AST, scope: ast.AST, name: str, kind: Kind, node: ast.AST, value: ast.expr | None, path: tuple[int | None, ...]) -> tuple[Key, Definition]:  # fmt: skip  # noqa: E501
        """The key and the definition of a binding; made once however often the flow comes by."""
        known = self._made.get((node, name))
        owner = self.owner(name, scope) or scope
        key = (owner, name)
        if known is None:
            known = self._made[(node, name)] = Definition(name, kind, node, value, path, owner)
            self.definitions.setdefault(key, []).append(known)
            self._chains[known] = chain
        return key, known

    def read(self, read: ast.expr, chain: ast.AST, key: Key, found: Iterable[Definition]) -> None:
        """Notes what the flow finds at a read; the sets of several passes join."""
        parts = self._pending.setdefault(read, [])
        for part in parts:
            if part.key == key:
                part.found.update(found)
                return
        parts.append(_Read(chain, key, set(found)))

    def unknown(self, read: ast.expr, key: Key, chain: ast.AST) -> None:
        """Notes that a read may find what is defined outside the file."""
        self.read(read, chain, key, (UNKNOWN,))

    def later(self, body: ast.AST) -> None:
        """Leaves the body of a function for when everything around it is known."""
        self._bodies.setdefault(body)


def _imported(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def arguments_of(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Iterator[ast.arg]:
    """A function's parameters, `*args` and `**kwargs` included."""
    arguments = function.args
    yield from (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    yield from filter(None, (arguments.vararg, arguments.kwarg))


def default_of(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, name: str) -> ast.expr | None:
    """A parameter's default; None where it has none."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    for argument, default in zip(reversed(positional), reversed(arguments.defaults), strict=False):
        if argument.arg == name:
            return default
    return next((d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if a.arg == name), None)


def _join(one: Env | None, other: Env | None) -> Env | None:
    if one is None or other is None or one is other:
        return one if other is None else other
    joined = dict(one)
    for key, found in other.items():
        before = one.get(key)
        if before is None:
            joined[key] = found | {_MISSING}
        elif before is not found and not found <= before:
            joined[key] = before | found
    for key in one.keys() - other.keys():
        joined[key] = one[key] | {_MISSING}
    return joined


class _Flow:
    """One pass of the data flow through a module or a function, with the classes and comprehensions that run inside it."""

    def __init__(self, result: Reaching, chain: ast.AST) -> None:
        self.result = result
        self.chain = chain
        self.scope = chain
        self.running: list[ast.AST] = [chain]
        self.env: Env | None = {}
        self.breaks: list[Env | None] = []
        self.continues: list[Env | None] = []
        self.returns: list[Env | None] = []
        self.raising: list[Env] = []

    def module(self, tree: ast.Module) -> None:
        self.block(tree.body)

    def function(self, node: ast.AST) -> None:
        assert isinstance(node, FUNCTIONS)
        for argument in arguments_of(node):
            self.bind(argument.arg, "parameter", argument, default_of(node, argument.arg))
        if isinstance(node, ast.Lambda):
            self.visit(node.body)
        else:
            self.block(node.body)

    # Bindings and reads

    def bind(self, name: str, kind: Kind, node: ast.AST, value: ast.expr | None = None, path: tuple[int | None, ...] = ()) -> None:
        if self.env is None:
            return
        scope = self.scope
        if kind == "assign" and isinstance(self.result.source.parents.get(node), ast.NamedExpr):
            while isinstance(scope, COMPREHENSIONS):
                scope = self.result._scopes[scope].parent or scope
        key, definition = self.result.define(self.chain, scope, name, kind, node, value, path)
        self.env[key] = frozenset((definition,))
        for left in self.raising:
            left[key] = left.get(key, frozenset((_MISSING,))) | {definition}

    def unbind(self, name: str) -> None:
        key = (self.result.owner(name, self.scope) or self.scope, name)
        if self.env is not None:
            self.env[key] = frozenset((_UNBOUND,))
            for left in self.raising:
                left[key] = left.get(key, frozenset((_MISSING,))) | {_UNBOUND}

    def read(self, read: ast.expr, name: str) -> None:
        scope: ast.AST | None = self.scope
        while scope is not None and self.env is not None:
            owner = self.result.owner(name, scope)
            if owner is None:
                self.result.unknown(read, (self.chain, name), self.chain)
                return
            key = (owner, name)
            found = self.env.get(key, frozenset((_MISSING,)))
            unbound = _UNBOUND in found or (_MISSING in found and owner in self.running)
            if _MISSING in found:
                found = (found - {_MISSING}) | {_UNBOUND if owner in self.running else _ANY}
            self.result.read(read, self.chain, key, found)
            if isinstance(owner, ast.Module) and (unbound or _ANY in found) and name in _BUILTINS:
                self.result.unknown(read, key, self.chain)
            if not (unbound and isinstance(owner, ast.ClassDef)):
                return
            scope = self.result._scopes[owner].parent  # a class body looks further when it has no such name yet

    def target(self, node: ast.expr, kind: Kind, value: ast.expr | None, path: tuple[int | None, ...] = ()) -> None:
        if isinstance(node, ast.Name):
            self.bind(node.id, kind, node, value, path)
        elif isinstance(node, (ast.Tuple, ast.List)):
            items = value.elts if isinstance(value, (ast.Tuple, ast.List)) and not path else None
            plain = not any(isinstance(element, ast.Starred) for element in (*node.elts, *(items or ())))
            for i, element in enumerate(node.elts):
                if items is not None and plain and len(items) == len(node.elts):
                    self.target(element, kind, items[i])
                else:
                    after_star = any(isinstance(before, ast.Starred) for before in node.elts[: i + 1])
                    self.target(element, kind, value, (*path, None if after_star else i))
        elif isinstance(node, ast.Starred):
            self.target(node.value, kind, value, path)
        else:
            self.visit(node)

    # Expressions

    def visit(self, node: ast.AST | None) -> None:
        if node is None:
            return
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                self.read(node, node.id)
        elif isinstance(node, ast.Lambda):
            self.defaults(node.args)
            self.result.later(node)
        elif isinstance(node, COMPREHENSIONS):
            self.comprehension(node)
        elif isinstance(node, ast.NamedExpr):
            self.visit(node.value)
            self.bind(node.target.id, "assign", node.target, node.value)
        elif isinstance(node, ast.BoolOp):
            self.visit(node.values[0])
            self.maybe(node.values[1:])
        elif isinstance(node, ast.IfExp):
            self.visit(node.test)
            self.either(lambda: self.visit(node.body), lambda: self.visit(node.orelse))
        elif not isinstance(node, ast.Constant):
            for child in ast.iter_child_nodes(node):
                self.visit(child)

    def maybe(self, nodes: list[ast.expr]) -> None:
        before = None if self.env is None else dict(self.env)
        for node in nodes:
            self.visit(node)
        self.env = _join(self.env, before)

    def either(self, one: Callable[[], object], other: Callable[[], object]) -> None:
        before = None if self.env is None else dict(self.env)
        one()
        after, self.env = self.env, before
        other()
        self.env = _join(after, self.env)

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        self.visit(node.generators[0].iter)
        outside, self.scope = self.scope, node
        self.running.append(node)

        def inside() -> None:
            for i, generator in enumerate(node.generators):
                if i:
                    self.visit(generator.iter)
                self.target(generator.target, "loop", generator.iter, (None,))
                for condition in generator.ifs:
                    self.visit(condition)
            for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
                self.visit(part)

        before = None if self.env is None else dict(self.env)
        inside()
        joined = _join(self.env, before)
        if joined is not None and before is not None and any(key[0] is not node and before.get(key) != joined[key] for key in joined):
            self.env = dict(joined)  # a walrus inside: the next round may read what this one has bound
            inside()
            joined = _join(self.env, joined)
        self.env = joined
        self.running.pop()
        self.scope = outside

    def defaults(self, arguments: ast.arguments) -> None:
        for default in (*arguments.defaults, *arguments.kw_defaults):
            self.visit(default)

    # Statements

    def block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            if self.env is None:
                return
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        handler = getattr(self, "on_" + type(node).__name__.lower(), None)
        if handler is None:
            self.visit(node)
        else:
            handler(node)

    def on_assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.target(target, "assign", node.value)

    def on_annassign(self, node: ast.AnnAssign) -> None:
        self.visit(node.annotation)
        self.visit(node.value)
        if node.value is not None:
            self.target(node.target, "assign", node.value)
        elif not isinstance(node.target, ast.Name):
            self.visit(node.target)

    def on_augassign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.read(node.target, node.target.id)
        else:
            self.visit(node.target)
        self.visit(node.value)
        if isinstance(node.target, ast.Name):
            self.bind(node.target.id, "augmented", node.target, node.value)

    def on_delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.read(target, target.id)
                self.unbind(target.id)
            else:
                self.visit(target)

    def on_import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.name != "*":
                self.bind(_imported(alias), "import", alias)
            elif self.env is not None:
                for key, found in self.env.items():
                    self.env[key] = found | {UNKNOWN}

    on_importfrom = on_import

    def on_functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator)
        self.defaults(node.args)
        for argument in arguments_of(node):
            self.visit(argument.annotation)
        self.visit(node.returns)
        self.bind(node.name, "function", node)
        self.result.later(node)

    on_asyncfunctiondef = on_functiondef

    def on_classdef(self, node: ast.ClassDef) -> None:
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        outside, self.scope = self.scope, node
        self.running.append(node)
        self.block(node.body)
        self.running.pop()
        self.scope = outside
        self.bind(node.name, "class", node)

    def on_if(self, node: ast.If) -> None:
        self.visit(node.test)
        self.either(lambda: self.block(node.body), lambda: self.block(node.orelse))

    def on_for(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)

        def turn() -> None:
            self.target(node.target, "loop", node.iter, (None,))
            self.block(node.body)

        self.loop(turn, node.orelse, lambda: None, endless=False)

    on_asyncfor = on_for

    def on_while(self, node: ast.While) -> None:
        endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
        self.loop(lambda: self.block(node.body), node.orelse, lambda: self.visit(node.test), endless=endless)

    def loop(self, turn: Callable[[], None], orelse: list[ast.stmt], test: Callable[[], None], *, endless: bool) -> None:
        entry = self.env
        breaks, continues = self.breaks, self.continues
        left: Env | None = None
        while True:
            self.env = None if entry is None else dict(entry)
            self.breaks, self.continues = [], []
            test()
            tested = None if self.env is None else dict(self.env)
            turn()
            for env in self.continues:
                self.env = _join(self.env, env)
            for env in self.breaks:
                left = _join(left, env)
            again = _join(entry, self.env)
            if again == entry:
                break
            entry = again
        self.breaks, self.continues = breaks, continues
        self.env = None if endless else tested
        self.block(orelse)
        self.env = _join(self.env, left)

    def on_break(self, node: ast.Break) -> None:
        self.breaks.append(self.env)
        self.env = None

    def on_continue(self, node: ast.Continue) -> None:
        self.continues.append(self.env)
        self.env = None

    def on_return(self, node: ast.Return) -> None:
        self.visit(node.value)
        self.returns.append(self.env)
        self.env = None

    def on_raise(self, node: ast.Raise) -> None:
        self.visit(node.exc)
        self.visit(node.cause)
        self.env = None

    def on_with(self, node: ast.With | ast.AsyncWith) -> None:
        swallows = False
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self.target(item.optional_vars, "with", item.context_expr)
            called = item.context_expr.func if isinstance(item.context_expr, ast.Call) else item.context_expr
            swallows |= (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) == "suppress"
        if not swallows or self.env is None:
            self.block(node.body)
            return
        self.raising.append(dict(self.env))
        self.block(node.body)
        self.env = _join(self.env, self.raising.pop())

    on_asyncwith = on_with

    def on_try(self, node: ast.Try) -> None:
        if self.env is None:
            return
        outer = self.breaks, self.continues, self.returns
        if node.finalbody:
            self.breaks, self.continues, self.returns = [], [], []
            self.raising.append(dict(self.env))
        self.raising.append(dict(self.env))
        self.block(node.body)
        raised = self.raising.pop()
        self.block(node.orelse)
        after: Env | None = self.env
        for handler in node.handlers:
            self.env = dict(raised)
            self.visit(handler.type)
            if handler.name:
                self.bind(handler.name, "except", handler)
            self.block(handler.body)
            if handler.name:
                self.unbind(handler.name)
            after = _join(after, self.env)
        self.env = after
        if node.finalbody:
            self.finish(node.finalbody, outer)

    on_trystar = on_try

    def finish(self, finalbody: list[ast.stmt], outer: tuple[list[Env | None], list[Env | None], list[Env | None]]) -> None:
        """Runs a `finally` for each way into it: normal, by an exception, and by `break`, `continue` and `return`."""
        normal, jumps = self.env, (self.breaks, self.continues, self.returns)
        self.breaks, self.continues, self.returns = outer
        raised: Env = self.raising.pop()
        self.env = raised
        self.block(finalbody)
        for left, target in zip(jumps, outer, strict=True):
            self.env = None
            for env in left:
                self.env = _join(self.env, env)
            if self.env is not None:
                self.env = dict(self.env)
                self.block(finalbody)
                if self.env is not None:
                    target.append(self.env)
        self.env = None if normal is None else dict(normal)
        self.block(finalbody)

    def on_match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        after: Env | None = None
        for case in node.cases:
            before = None if self.env is None else dict(self.env)
            self.pattern(case.pattern, node.subject)
            self.visit(case.guard)
            tried = None if self.env is None else dict(self.env)
            self.block(case.body)
            after = _join(after, self.env)
            certain = case.guard is None and isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None
            self.env = None if certain else _join(before, tried) if case.guard is not None else before
        self.env = _join(after, self.env)

    def pattern(self, node: ast.AST, subject: ast.expr) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.pattern):
                self.pattern(child, subject)
            else:
                self.visit(child)
        name = node.rest if isinstance(node, ast.MatchMapping) else getattr(node, "name", None)
        if name:
            self.bind(name, "match", node, subject, (None,))
