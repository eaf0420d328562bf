"""Where in the source a held value was put there, and how that place lies to the place that is running: in the same turn of a
loop, in the turn before, or once, before it all began.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Literal

import torch

from gradguard.analysis.live.contents import lookup, tensors_in
from gradguard.analysis.live.frames import FrameView
from gradguard.analysis.live.holders import Holding
from gradguard.analysis.places.instructions import scope_of
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.bindings import assignments_to, dotted, targets_of
from gradguard.analysis.program.blocks import function_around
from gradguard.analysis.program.defuse import guards_a_cache, position_before, stores_into
from gradguard.analysis.program.index import program_of
from gradguard.analysis.program.stored_values import built_with, stores_through_names, without_graph
from gradguard.analysis.program.syntax import FUNCTIONS, Source, header_range, load
from gradguard.core.callsite import USER_FILES
from gradguard.core.diagnosis import Role, SourceSpan
from gradguard.core.safe_read import class_attributes, code_of_member

# "carried": left there by the turn before; "fresh": put there earlier in this very turn; "outside": before the loop;
# "cache": only when it is not there yet; "init": in a constructor; "method": in a method that nothing on the stack shows.
Relation = Literal["carried", "fresh", "outside", "cache", "init", "method"]


@dataclass(frozen=True, eq=False)
class Store:
    """A statement that puts a value where it is held."""

    source: Source
    statement: ast.stmt
    relation: Relation

    @property
    def file(self) -> str:
        return self.source.filename

    @property
    def line(self) -> int:
        return self.statement.lineno

    @property
    def end_line(self) -> int:
        return header_range(self.statement)[2]

    @property
    def function(self) -> ast.AST | None:
        return next((above for above in self.source.ancestors(self.statement) if isinstance(above, FUNCTIONS)), None)

    @property
    def function_name(self) -> str:
        return self.source.qualname_around(self.statement)

    def span(self, label: str, role: Role = "culprit") -> SourceSpan:
        return self.source.span(header_range(self.statement), label, role, self.function_name)

    @property
    def value(self) -> ast.expr | None:
        """What is put there."""
        if isinstance(self.statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            return self.statement.value
        return self.statement.value if isinstance(self.statement, (ast.Expr, ast.Return)) else None

    def filled(self, attribute: str | None) -> list[str]:
        """What the statement calls the attribute that it fills: `body.speed` outside of the owner's class."""
        names = [dotted(target) or "" for target in targets_of(self.statement)]
        return [name for name in names if name.endswith(f".{attribute}")]

    def covers(self, place: ResolvedSite | None) -> bool:
        """Whether a place lies in this statement."""
        return place is not None and place.file == self.file and self.line <= place.line <= (self.statement.end_lineno or self.line)

    def runs(self, place: ResolvedSite | None) -> bool:
        """Whether a function that computing the value runs has a place in it."""
        program = program_of(self.source)
        if place is None or program is None or self.value is None or place.file != self.file:
            return False
        return any(place.enclosing_function is function for function in program.may_run(self.value))


def relation_in(source: Source, statement: ast.stmt, place: ResolvedSite) -> Relation:
    """How a store lies to the place that a frame of the same function is executing."""
    at = place.statement
    loops = place.enclosing_loops
    if at is None:
        return "outside"
    if not loops:
        if place.enclosing_function is None:
            return "outside"
        # a function that is called in each turn: what stands behind the running statement was done in the turn before
        return "fresh" if statement is not at and position_before(statement, at) else "carried"
    loop = loops[0]
    if not source.stands_in(statement, loop):
        return "outside"
    if statement is at or not position_before(statement, at):
        return "carried"
    for above in source.ancestors(statement):
        if above is loop:
            return "fresh"
        if isinstance(above, (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.Match)) and not source.stands_in(at, above):
            return "carried"  # may not have run in this turn
    return "fresh"


def stores_of_variable(name: str, view: FrameView, *, container: bool) -> list[Store]:
    """The statements of a frame's own function that put something into one of its variables."""
    code = view.frame.f_code
    source = load(code.co_filename)
    place = resolve(view.site)
    scope = None if source is None else scope_of(source, code)
    if source is None or scope is None or place is None:
        return []
    puts = stores_into(scope, name) if container else []
    found = []
    for statement in dict.fromkeys([*puts, *assignments_to(scope, name)]):
        here = _own_scope(source, statement) is scope
        found.append(Store(source, statement, relation_in(source, statement, place) if here else _off_stack(source, statement, name)))
    return _kept(found, set(puts))


def taken_from(tensor: torch.Tensor, held: Sequence[Holding], frames: Sequence[FrameView]) -> list[Holding]:
    """The containers that a tensor is in, where a variable holds it that a loop has set: `for x, y in pairs` takes it out of `pairs`."""
    found: list[Holding] = []
    for holding in held:
        view = view_of(holding.frame, frames)
        place = None if view is None else resolve(view.site)
        if view is None or place is None:
            continue
        for loop in place.enclosing_loops:
            if isinstance(loop, ast.While) or holding.name not in map(dotted, targets_of(loop)):
                continue
            for read in ast.walk(loop.iter):
                name = dotted(read) if isinstance(read, (ast.Name, ast.Attribute)) else None
                value = None if name is None else lookup(view, name)
                if name is not None and isinstance(value, (list, tuple, dict)) and any(item is tensor for item in tensors_in(value)):
                    owner = lookup(view, name.rpartition(".")[0]) if "." in name else None
                    frame = holding.frame if owner is None and name in view.locals else None
                    found.append(Holding(name, name.rpartition(".")[2], owner, frame, (type(value).__name__,), tensor))
    return found


def _kept(stores: list[Store], puts: set[ast.stmt]) -> list[Store]:
    """What is put into a container in this turn stays there for the next, unless the container itself is made anew in each turn."""
    if any(store.relation == "fresh" and store.statement not in puts for store in stores):
        return stores
    return [replace(store, relation="carried") if store.relation == "fresh" and store.statement in puts else store for store in stores]


def stores_of_global(name: str, frames: Sequence[FrameView], *, container: bool) -> list[Store]:
    """The statements anywhere in the files around that put something into a variable of a module or of an enclosing function."""
    found: list[Store] = []
    for file in dict.fromkeys(view.frame.f_code.co_filename for view in frames):
        source = load(file)
        if source is None or source.tree is None:
            continue
        scopes: list[ast.AST] = [source.tree, *(scope for scope in source.scopes if isinstance(scope, FUNCTIONS))]
        statements = {statement: None for scope in scopes for statement in assignments_to(scope, name)}
        if container:
            statements.update(dict.fromkeys(stores_into(source.tree, name)))
        found.extend(Store(source, statement, _attribute_relation(source, statement, name, frames)) for statement in statements)
    return found


def stores_of_attribute(holding: Holding, frames: Sequence[FrameView]) -> list[Store]:
    """The statements that put something into an attribute: in the owner's classes, then in the files around."""
    container = bool(holding.through)
    puts: set[ast.stmt] = set()
    found: dict[ast.stmt, Store] = {}
    for source, definition in classes_of(holding.owner):
        name = f"self.{holding.attribute}"
        inserting = stores_into(definition, name)  # also for a tensor: `self.table[ids] = values`
        if container:
            inserting = [*inserting, *stores_through_names(definition, name), *_growths(source, definition, name)]
        puts.update(inserting)
        for statement in [*inserting, *assignments_to(definition, name)]:
            found.setdefault(statement, Store(source, statement, _attribute_relation(source, statement, name, frames)))
    if (container and not puts) or all(map(_stores_nothing, found.values())):  # nor is it filled where an empty one is made
        for file in dict.fromkeys(view.frame.f_code.co_filename for view in frames if view.is_user):
            outside = load(file)
            for statement, name in _foreign_stores(outside, holding.attribute) if outside is not None else ():
                assert outside is not None
                found.setdefault(statement, Store(outside, statement, _attribute_relation(outside, statement, name, frames)))
    if not found:
        found = {
            store.statement: store
            for source, definition in classes_of(holding.owner)
            for store in _cached_property(source, definition, holding.attribute)
        }
    if not found and not isinstance(holding.owner, type):
        for file in dict.fromkeys([view.frame.f_code.co_filename for view in frames if view.is_user]):
            outside = load(file)
            for statement in built_with(outside, type(holding.owner), holding.attribute) if outside is not None else ():
                assert outside is not None
                found.setdefault(statement, Store(outside, statement, _attribute_relation(outside, statement, holding.name, frames)))
    return [store for store in (_kept(list(found.values()), puts) if container else found.values()) if not _stores_nothing(store)]


def _growths(source: Source, definition: ast.ClassDef, name: str) -> Iterator[ast.stmt]:
    """The statements of a class that put something into a container, also by a method that was given a name (`put = self.bank.append`)."""
    program = program_of(source)
    for growth in () if program is None else program.grows(name):
        statement = source.statement(growth.node)
        if statement is not None and source.stands_in(statement, definition):
            yield statement


def _cached_property(source: Source, definition: ast.ClassDef, attribute: str) -> Iterator[Store]:
    """The `return` of a property whose result is kept in the instance."""
    for node in definition.body:
        if isinstance(node, ast.FunctionDef) and node.name == attribute and node.decorator_list:
            for statement in returns_of(node):
                yield Store(source, statement, "cache")


def returns_of(function: ast.AST) -> list[ast.Return]:
    """A function's own `return` statements that give something back."""
    found: list[ast.Return] = []
    stack = list(getattr(function, "body", []))
    while stack:
        node = stack.pop(0)
        if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
            found.append(node)
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            stack = [*ast.iter_child_nodes(node), *stack]
    return found


def _stores_nothing(store: Store) -> bool:
    """`self.state = None`, empty containers and fresh tensors hold no graph."""
    return isinstance(store.statement, (ast.Assign, ast.AnnAssign)) and without_graph(store.value)


def _foreign_stores(source: Source, attribute: str) -> Iterator[tuple[ast.stmt, str]]:
    """Statements that fill an attribute of this name from outside its class, or put something into what it holds."""
    for node in ast.walk(source.tree or ast.Module([], [])):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            for target in targets_of(node):
                name = dotted(target.value if isinstance(target, ast.Subscript) else target)
                if name is not None and name.endswith(f".{attribute}"):
                    yield node, name
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
            name = dotted(node.value.func.value)
            if name is not None and name.endswith(f".{attribute}") and node in stores_into(node, name):
                yield node, name


def _attribute_relation(source: Source, statement: ast.stmt, name: str, frames: Sequence[FrameView]) -> Relation:
    off = _off_stack(source, statement, name)
    if off in ("cache", "init"):
        return off
    view = frame_of(source, statement, frames)
    place = None if view is None else resolve(view.site)
    return off if place is None else relation_in(source, statement, place)


def _off_stack(source: Source, statement: ast.stmt, name: str) -> Relation:
    if guards_a_cache(source, statement, name):
        return "cache"
    function = function_around(source, statement)
    if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return "init" if function.name in ("__init__", "__new__", "__post_init__") else "method"
    return "outside"


def frame_of(source: Source, statement: ast.stmt, frames: Sequence[FrameView]) -> FrameView | None:
    """The live frame whose function the statement belongs to."""
    for view in frames:
        if view.is_user and view.frame.f_code.co_filename == source.filename:
            scope = scope_of(source, view.frame.f_code)
            if scope is not None and _own_scope(source, statement) is scope:
                return view
    return None


def _own_scope(source: Source, statement: ast.stmt) -> ast.AST | None:
    return function_around(source, statement) or source.tree


def classes_of(owner: Any) -> Iterator[tuple[Source, ast.ClassDef]]:
    """The class statements of an object's class and of the user's classes it derives from."""
    kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    for kind in kinds:
        files = {
            code.co_filename
            for member in class_attributes(kind).values()
            if (code := code_of_member(member)) is not None and USER_FILES[code.co_filename]
        }
        for source in filter(None, map(load, sorted(files))):
            for scope in source.scopes:
                if isinstance(scope, ast.ClassDef) and source.qualname(scope) == kind.__qualname__:
                    yield source, scope


def view_of(frame: FrameType | None, frames: Sequence[FrameView]) -> FrameView | None:
    """The view of a live frame."""
    return next((view for view in frames if view.frame is frame), None)
