"""What a program does with a container besides putting things into it: looking something up by its key, or anything else."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import NamedTuple

from gradguard.analysis.program.expressions import last_part
from gradguard.analysis.program.index import GROWING_METHODS
from gradguard.analysis.program.syntax import Source

_EMPTYING = frozenset({"clear"})
_WHOLE = frozenset({"dump", "dumps", "save", "asdict", "vars", "copy", "deepcopy"})
_LOOKING_UP = frozenset({"get", "setdefault"})


class Reads(NamedTuple):
    """The places that read a container."""

    by_key: list[ast.AST]
    """`x[key]`, `x.get(key)` and `key in x`."""
    other: list[ast.AST]
    """All others: it is gone over, handed on, returned, emptied."""


def reads_of_store(sources: Iterable[Source], name: str) -> Reads:
    """The reads of a variable or attribute of this name, of whatever object, in these files."""
    found = Reads([], [])
    for source in sources:
        for node in source.parents:
            reads = (isinstance(node, ast.Attribute) and node.attr == name) or (isinstance(node, ast.Name) and node.id == name)
            if reads and isinstance(getattr(node, "ctx", None), ast.Load):
                _sort_in(source, node, found)
            elif isinstance(node, ast.Constant) and node.value == name:  # `getattr(x, "name")`
                found.other.append(node)
    return found


def saves_objects(sources: Iterable[Source]) -> bool:
    """Whether an object is written or read as a whole somewhere, with all its attributes: pickled, saved, turned into a dictionary."""
    return any(_takes_all(node) for source in sources for node in source.parents)


def _takes_all(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in ("__dict__", "__getstate__")
    return (
        isinstance(node, ast.Call) and last_part(node) in _WHOLE and any(isinstance(each, (ast.Name, ast.Attribute)) for each in node.args)
    )


def _sort_in(source: Source, node: ast.AST, found: Reads) -> None:
    parents = source.parents
    up = parents.get(node)
    by_key = False
    while True:
        call = parents.get(up) if up is not None else None
        if isinstance(up, ast.Subscript) and up.value is node:
            if isinstance(up.ctx, ast.Store):
                return
            by_key = by_key or isinstance(up.ctx, ast.Load)
            if isinstance(up.ctx, ast.Del):
                break
            node, up = up, parents.get(up)
        elif isinstance(up, ast.Attribute) and up.attr in _LOOKING_UP and isinstance(call, ast.Call) and call.func is up:
            by_key = True
            node, up = call, parents.get(call)
        else:
            break
    if isinstance(up, ast.Attribute) and up.value is node and up.attr in GROWING_METHODS:
        return
    if isinstance(up, ast.Attribute) and up.attr in _EMPTYING:
        found.other.append(up)
    elif isinstance(up, ast.Call) and isinstance(up.func, ast.Name) and up.func.id == "len":
        return
    elif isinstance(up, ast.Compare) and node in up.comparators and all(isinstance(op, (ast.In, ast.NotIn)) for op in up.ops):
        found.by_key.append(up)
    elif by_key:
        found.by_key.append(node)
    else:
        found.other.append(node)
