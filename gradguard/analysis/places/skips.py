"""Conditions that make a rank leave out a call that stands in a loop: a branch around it, or one before it that ends the iteration."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from gradguard.analysis.places.source import Loop, ResolvedSite, dotted, segment
from gradguard.analysis.program.expressions import inside, last_part
from gradguard.analysis.program.syntax import FUNCTIONS, Source, parent_of

Branch = ast.If
Node = ast.AST


class Skip(NamedTuple):
    """A statement that leaves an iteration before a place, or the condition around the place."""

    file: str
    node: ast.stmt
    test: ast.expr

    @property
    def condition(self) -> str:
        return segment(self.file, self.test) or ast.unparse(self.test)

    @property
    def word(self) -> str:
        return {ast.Continue: "continue", ast.Break: "break", ast.Return: "return"}.get(type(self.node), "if")

    def how(self, call: str) -> str:
        """What it does to a call."""
        if self.word == "if":
            return f"{call} runs only on a rank where `{self.condition}` holds"
        return f"`{self.word}` skips {call} on a rank where `{self.condition}` holds"


def text(skip: Skip) -> str:
    """Line and condition."""
    return f"line {skip.node.lineno}: {skip.condition}"


def before(place: ResolvedSite) -> list[Skip]:
    """Those of a place's loop, conditions that only count iterations apart: they are the same on every rank."""
    start = place.node or place.statement
    if start is None:
        return []
    found: list[Skip] = []
    counters: set[str] = set()
    around = list(inside_out(place.file, start))
    for child, above in around:
        if isinstance(above, (ast.For, ast.While)) and child in above.body:
            counters |= _counters(above)
            break
    for child, above in around:
        looping = isinstance(above, (ast.For, ast.While)) and child in above.body
        block = next((b for b in (getattr(above, name, None) for name in ("body", "orelse")) if isinstance(b, list) and child in b), None)
        for earlier in block[: block.index(child)] if block is not None else ():
            if isinstance(earlier, ast.If) and not _by_count(earlier.test, counters):
                found += [Skip(place.file, leave, earlier.test) for leave in _leaves(earlier)]
        if isinstance(above, ast.If) and child in above.body and not _is_main(above) and not _by_count(above.test, counters):
            found.append(Skip(place.file, above, above.test))
        if looping:
            break
    return found


def _leaves(branch: ast.If) -> list[ast.stmt]:
    last: list[ast.stmt] = [item for item in branch.body if isinstance(item, (ast.Continue, ast.Break, ast.Return))]
    return last[:1]


def _counters(loop: Loop) -> set[str]:
    """Variables that count rounds: they are the same on every rank."""
    counted = [node for node in inside(loop, ast.AugAssign) if isinstance(node.value, ast.Constant)]
    found = {node.target.id for node in counted if isinstance(node.target, ast.Name)}
    if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call):
        target = loop.target
        if last_part(loop.iter.func) == "range" and isinstance(target, ast.Name):
            found.add(target.id)
        elif last_part(loop.iter.func) == "enumerate" and isinstance(target, ast.Tuple) and isinstance(target.elts[0], ast.Name):
            found.add(target.elts[0].id)
    return found


def _by_count(test: ast.expr, counters: set[str]) -> bool:
    """Whether a condition reads nothing but counters and constants of the program."""
    if any(inside(test, ast.Call)):
        return False
    names = [dotted(node) or "" for node in inside(test, ast.Name)]
    return bool(names) and any(name in counters for name in names)


def inside_out(file: str, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Pairs (node, its parent) up to the enclosing function."""
    above = parent_of(file, node)
    while above is not None:
        yield node, above
        if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        node, above = above, parent_of(file, above)


class Exits(NamedTuple):
    """How a loop can end before its items do.

    Attributes:
        found: breaks and returns under a condition.
        others: whether there are any under none that is known, such as a handler.
        items: whether its items end it: a `for` loop, or one that a `StopIteration` leaves.
        counted: whether its items are numbers of a range.
    """

    found: list[Skip]
    others: bool
    items: bool
    counted: bool


def exits(place: ResolvedSite, loop: Loop) -> Exits:
    """How a loop can end; an exception that a handler around it catches is among the others."""
    found: list[Skip] = []
    others, items = _caught(place, loop), isinstance(loop, ast.For)
    counters = _counters(loop)
    for leave in _leaving(loop):
        around = [above for _, above in inside_out(place.file, leave)]
        near = next(above for above in around if isinstance(above, (ast.If, ast.ExceptHandler, ast.For, ast.While)))
        if isinstance(near, ast.If):
            if not _by_count(near.test, counters):
                found.append(Skip(place.file, leave, near.test))
        elif isinstance(near, ast.ExceptHandler) and near.type is not None and last_part(near.type) == "StopIteration":
            items = True
        else:
            others = True
    test = loop.test if isinstance(loop, ast.While) else None
    others = others or (test is not None and not isinstance(test, ast.Constant))
    counted = isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) and last_part(loop.iter.func) == "range"
    return Exits(found, others, items, counted)


def _leaving(loop: Loop) -> list[ast.Break | ast.Return]:
    """The statements that leave a loop."""
    found: list[ast.Break | ast.Return] = []
    within: list[tuple[ast.AST, bool]] = [(node, True) for node in loop.body]
    while within:
        node, own = within.pop()
        if isinstance(node, ast.Return) or (isinstance(node, ast.Break) and own):
            found.append(node)
        if not isinstance(node, FUNCTIONS):
            own = own and not isinstance(node, (ast.For, ast.While, ast.AsyncFor))
            within += [(child, own) for child in ast.iter_child_nodes(node)]
    return found


def _caught(place: ResolvedSite, loop: Loop) -> bool:
    """Whether what an iteration raises can end the loop and no more: within the guard, which takes note of what leaves it."""
    for child, above in inside_out(place.file, loop):
        if isinstance(above, (ast.With, ast.AsyncWith)):
            text = " ".join(ast.unparse(item.context_expr) for item in above.items)
            if "guard" in text.lower():
                return False
            if "suppress" in text:
                return True
        elif (
            isinstance(above, ast.Try) and child in above.body and not all(isinstance(each.body[-1], ast.Raise) for each in above.handlers)
        ):
            return True
    return False


def branches_around(source: Source, node: ast.AST) -> list[ast.If]:
    """The `if` statements that a place stands in, innermost first; not `if __name__ == "__main__":`."""
    return [above for above in source.ancestors(node) if isinstance(above, ast.If) and not _is_main(above)]


def _is_main(node: ast.If) -> bool:
    return any(name.id == "__name__" for name in inside(node.test, ast.Name))


def block_of(source: Source, at: ast.AST, node: ast.If) -> str | None:
    """Which branch of the `if` a place stands in."""
    for name in ("body", "orelse"):
        if any(source.stands_in(at, statement) for statement in getattr(node, name)):
            return name
    return None
