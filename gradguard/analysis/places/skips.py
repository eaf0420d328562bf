"""Conditions that make a rank leave out a call that stands in a loop: a branch around it, or one before it that ends the iteration."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from gradguard.analysis.places.source import Loop, ResolvedSite, dotted, segment
from gradguard.analysis.program.expressions import inside, last_part
from gradguard.analysis.program.syntax import FUNCTIONS, parent_of


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


def _counters(loop: ast.For | ast.While) -> set[str]:
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


def exhausts(loop: Loop) -> bool:
    """Whether a loop ends only when there is nothing left to iterate over."""
    if isinstance(loop, ast.While):
        return False
    inside: list[ast.AST] = list(loop.body)
    while inside:
        node = inside.pop()
        if isinstance(node, (ast.Break, ast.Return)):
            return False
        if not isinstance(node, FUNCTIONS):
            inside += ast.iter_child_nodes(node)
    return True


Branch = ast.If


def branches_around(place: ResolvedSite | None) -> list[Branch]:
    """The `if` statements that a place stands in, innermost first; not `if __name__ == "__main__":`."""
    node = None if place is None else place.node or place.statement
    if place is None or place.source is None or node is None:
        return []
    return [above for above in place.source.ancestors(node) if isinstance(above, ast.If) and not _is_main(above)]


def _is_main(node: ast.If) -> bool:
    return any(name.id == "__name__" for name in inside(node.test, ast.Name))


def block_of(site: ResolvedSite, node: ast.If) -> str | None:
    """Which branch of the `if` a place stands in."""
    if site.source is None or (at := site.node or site.statement) is None:
        return None
    for name in ("body", "orelse"):
        if any(site.source.stands_in(at, statement) for statement in getattr(node, name)):
            return name
    return None
