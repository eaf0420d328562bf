"""How values flow through a function's source, as far as the text alone tells: which variables a loop carries from one turn to
the next, where a name is used without being detached, which parameter an argument becomes.

An approximation on purpose (no aliases, no exceptions): it proposes places, and what is known of the run (live values, call
sites, sequence numbers) decides between them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gradguard.analysis.program.bindings import dotted, flatten, targets_of
from gradguard.analysis.program.syntax import FUNCTIONS, Source

Loop = ast.For | ast.AsyncFor | ast.While

_CUTS = {"detach", "detach_", "item", "tolist", "numpy", "data", "argmax", "argmin", "bool", "int", "long", "size", "shape", "dim", "numel"}
_CUTTING_CALLS = {"float", "int", "bool", "len", "isinstance", "type", "print", "id", "str", "repr", "format"}
STORING_METHODS = {
    *("append", "appendleft", "extend", "extendleft", "insert", "add", "update", "setdefault"),
    *("put", "put_nowait", "push", "enqueue", "store"),
    "__setitem__",
}  # fmt: skip


class Carried(NamedTuple):
    """A name that a loop reads before it assigns it: what it holds was left there by the turn before."""

    name: str
    stores: tuple[ast.stmt, ...]  # in the loop, in source order
    read: ast.expr | None  # the first read in the loop that comes before any assignment


def loop_carried(loop: Loop) -> list[Carried]:
    """The names (plain, or dotted such as `self.h`) that the loop carries from turn to turn, in the order of their first read."""
    walker = _Exposed()
    if isinstance(loop, ast.While):
        walker.expression(loop.test)
    else:
        walker.definite.update(name for target in flatten(loop.target) if (name := dotted(target)))
    walker.block(loop.body)
    return [Carried(name, tuple(walker.stores[name]), read) for name, read in walker.exposed.items() if walker.stores.get(name)]


class _Exposed:
    """Goes through a block in source order; notes reads of names that nothing before has certainly assigned."""

    def __init__(self) -> None:
        self.definite: set[str] = set()
        self.exposed: dict[str, ast.expr] = {}
        self.stores: dict[str, list[ast.stmt]] = {}

    def expression(self, node: ast.AST | None) -> None:
        if node is None:
            return
        for child in _reads(node):
            name = dotted(child)
            if name is None:
                continue
            parts = name.split(".")
            for length in range(1, len(parts) + 1):
                prefix = ".".join(parts[:length])
                if prefix in self.definite:
                    break
                self.exposed.setdefault(prefix, child)

    def store(self, statement: ast.stmt, targets: Iterable[ast.expr]) -> None:
        for target in targets:
            name = dotted(target)
            if name is None:
                self.expression(target)
                continue
            self.stores.setdefault(name, []).append(statement)
            self.definite.add(name)

    def block(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Assign):
            self.expression(statement.value)
        elif isinstance(statement, ast.AugAssign):
            self.expression(statement.value)
            name = dotted(statement.target)
            if name is not None and name not in self.definite:
                self.exposed.setdefault(name, statement.target)
        elif isinstance(statement, ast.AnnAssign):
            self.expression(statement.value)
        elif isinstance(statement, (ast.For, ast.AsyncFor)):
            # taken to run at least once: what an inner loop leaves behind is from this turn
            self.expression(statement.iter)
            self.definite.update(name for target in targets_of(statement) if (name := dotted(target)))
            self.block(statement.body)
            self.branch(statement.orelse)
            return
        elif isinstance(statement, ast.While):
            self.expression(statement.test)
            self.block(statement.body)
            self.branch(statement.orelse)
            return
        elif isinstance(statement, ast.If):
            self.expression(statement.test)
            before = set(self.definite)
            self.block(statement.body)
            one, self.definite = self.definite, set(before)
            self.block(statement.orelse)
            self.definite &= one
            return
        elif isinstance(statement, (ast.With, ast.AsyncWith)):
            for item in statement.items:
                self.expression(item.context_expr)
            self.store(statement, targets_of(statement))
            self.block(statement.body)
            return
        elif isinstance(statement, ast.Try):
            self.block(statement.body)
            for handler in statement.handlers:
                self.branch(handler.body)
            self.branch(statement.orelse)
            self.block(statement.finalbody)
            return
        elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # runs when it is called; what it reads of outer names it reads then, what it assigns is its own unless declared so
            own = {argument.arg for argument in ast.walk(statement.args) if isinstance(argument, ast.arg)}
            own |= {
                name
                for inner in ast.walk(statement)
                if isinstance(inner, ast.stmt)
                for target in targets_of(inner)
                if (name := dotted(target))
            }
            for child in _reads(ast.Module(statement.body, [])):
                name = dotted(child)
                if name is not None and name.partition(".")[0] not in own:
                    self.expression(child)
            self.definite.add(statement.name)
            return
        elif isinstance(statement, ast.ClassDef):
            return
        else:
            self.expression(statement)
        self.store(statement, targets_of(statement))

    def branch(self, statements: Iterable[ast.stmt]) -> None:
        before = set(self.definite)
        self.block(statements)
        self.definite = before


def _reads(node: ast.AST) -> Iterator[ast.expr]:
    """The outermost names and dotted attributes read inside, in source order."""
    if isinstance(node, (ast.Name, ast.Attribute)) and dotted(node) is not None:
        if isinstance(node.ctx, ast.Load):
            yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from _reads(child)


def reads_of(node: ast.AST, name: str) -> list[ast.expr]:
    """The places inside `node` that read `name`, or something of it (`state` in `state.h`)."""
    return [child for read in _reads(node) if (child := _prefix(read, name)) is not None]


def _prefix(node: ast.expr, name: str) -> ast.expr | None:
    current: ast.expr = node
    while True:
        if dotted(current) == name:
            return current
        if not isinstance(current, ast.Attribute):
            return None
        current = current.value


def is_detached(source: Source, read: ast.expr) -> bool:
    """Whether what is read is cut off from its graph before its statement uses it: `.detach()`, `.item()`, `.data`, under no_grad."""
    child: ast.AST = read
    for above in source.ancestors(read):
        if isinstance(above, ast.Attribute) and above.attr in _CUTS:
            return True
        if isinstance(above, ast.Call) and child is not above.func:
            called = dotted(above.func) or ""
            if called in _CUTTING_CALLS or called.rpartition(".")[2] in ("no_grad", "detach", "tensor"):
                return True
        if (
            isinstance(above, (ast.With, ast.AsyncWith))
            and child not in above.items
            and any(_is_no_grad(item.context_expr) for item in above.items)
        ):
            return True
        if isinstance(above, FUNCTIONS):
            return not isinstance(above, ast.Lambda) and any(_is_no_grad(item) for item in above.decorator_list)
        child = above
    return False


def _is_no_grad(node: ast.expr) -> bool:
    called = node.func if isinstance(node, ast.Call) else node
    return (dotted(called) or "").rpartition(".")[2] in ("no_grad", "inference_mode")


def position_before(one: ast.AST, other: ast.AST) -> bool:
    """Whether `one` stands wholly before `other` in the text."""
    end = (getattr(one, "end_lineno", 0) or 0, getattr(one, "end_col_offset", 0) or 0)
    return end <= (getattr(other, "lineno", 0), getattr(other, "col_offset", 0))


def stores_into(tree: ast.AST, name: str) -> list[ast.stmt]:
    """Statements that put something into the container or object called `name`: `name.append(x)`, `name[k] = v`, in source order."""
    found: dict[ast.stmt, None] = {}

    def walk(node: ast.AST, statement: ast.stmt | None) -> None:
        if isinstance(node, ast.stmt):
            statement = node
        if statement is not None:
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in STORING_METHODS
                and _is_part(node.func.value, name)
            ):
                found.setdefault(statement)
            if isinstance(node, ast.stmt) and any(
                isinstance(target, ast.Subscript) and _is_part(target.value, name) for target in targets_of(node)
            ):
                found.setdefault(statement)
        for child in ast.iter_child_nodes(node):
            walk(child, statement)

    walk(tree, None)
    return sorted(found, key=lambda statement: statement.lineno)


def _is_part(node: ast.expr, name: str) -> bool:
    """Whether an expression is the thing itself or an attribute of it (`self.memory.slots` of `self.memory`)."""
    written = dotted(node) or ""
    return written == name or (written.startswith(name + ".") and "." in name)


def guards_a_cache(source: Source, statement: ast.stmt, name: str) -> bool:
    """Whether the store runs only while the thing is not there yet: `if self.x is None`, `if key not in cache`, `hasattr`, `== 0`.

    What is made from what was there before (`self.mean = 0.9 * self.mean + ...`) continues it, in whatever branch it stands.
    """
    value = getattr(statement, "value", None)
    if isinstance(statement, ast.AugAssign) or (
        isinstance(statement, (ast.Assign, ast.AnnAssign)) and value is not None and reads_of(value, name)
    ):
        return False
    child: ast.AST = statement
    for above in source.ancestors(statement):
        if isinstance(above, FUNCTIONS):
            return _returns_early(above, statement, name)
        if isinstance(above, ast.If) and child is not above.test and _asks_for(above.test, name):
            return True
        child = above
    return False


def _asks_for(test: ast.expr, name: str) -> bool:
    last = name.rpartition(".")[2]
    for node in ast.walk(test):
        asked = isinstance(node, ast.Compare) and any(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in node.ops)
        if asked and any(reads_of(part, name) or reads_of(part, last) for part in ast.iter_child_nodes(node)):
            return True
        if (
            isinstance(node, ast.Call)
            and dotted(node.func) in ("hasattr", "getattr")
            and any(isinstance(argument, ast.Constant) and argument.value == last for argument in node.args)
        ):
            return True
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and dotted(node.operand) in (name, last):
            return True
    return False


def _returns_early(function: ast.AST, statement: ast.stmt, name: str) -> bool:
    """`if self.x is not None: return self.x` above the store."""
    if isinstance(function, ast.Lambda):
        return False
    for node in getattr(function, "body", []):
        if node is statement or node.lineno >= statement.lineno:
            return False
        if isinstance(node, ast.If) and node.body and isinstance(node.body[-1], ast.Return) and _asks_for(node.test, name):
            return True
    return False
