"""Which line of the user's wrote into an array that shares a tensor's memory: looked for in the source.

PyTorch cannot see numpy's writes and gradguard does not trace numpy; but the array's variables are known (what `.numpy()` was
assigned to, and every array in the frames that lies in the tensor's memory), and in-place statements on them are few.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.bindings import dotted, flatten
from gradguard.analysis.program.expressions import argument, inside, is_constant, last_part
from gradguard.analysis.program.index import assigned, program_of
from gradguard.analysis.program.memory import iterated, memory_writes, own_calls, peel, statements_of
from gradguard.analysis.program.syntax import FUNCTIONS, Source
from gradguard.core.diagnosis import SourceSpan
from gradguard.core.safe_read import attributes
from gradguard.instrumentation.facts import Prints
from gradguard.rules.spans import class_node

_METHODS = frozenset({"fill", "sort", "partition", "put", "itemset", "setfield", "byteswap"})
_FIRST = frozenset({"copyto", "place", "putmask", "put", "fill_diagonal", "put_along_axis", "shuffle", "at"})


@dataclass
class ArrayWrite:
    """A statement that writes into the array."""

    source: Source
    node: ast.AST
    name: str

    def span(self, label: str) -> SourceSpan:
        """The statement as the culprit."""
        return self.source.span_of(self.node, label, "culprit")


@dataclass
class ArrayStory:
    """What is known of the array: where it left the tensor, and which statements write into it."""

    left: ResolvedSite | None
    name: str | None
    writes: list[ArrayWrite]


def array_story(incident: Incident, tensor: torch.Tensor, mark: Prints) -> ArrayStory:
    """The arrays on the memory whose contents were noted, and the statements that write into them."""
    found: list[ArrayWrite] = []
    left: ResolvedSite | None = None
    name: str | None = None
    for fact in reversed(incident.journal.escapes):
        if fact.storage is None or fact.storage != mark.storage:
            continue
        if fact.clock < mark.clock and (fact.array is None or fact.array() is None):
            continue  # it may have been the memory of another tensor, which is gone
        place = resolve(fact.site)
        if place is None or place.source is None:
            continue
        left = left or place
        scope: ast.AST | None = place.enclosing_function or place.source.tree
        for target in _receivers(place):
            name = name or target
            if scope is not None:
                found += writes_in(place.source, scope, target, place)
        found += _passed_on(place.source, place.node, None)
        if found:
            break
    for expression, source, inner, variable in _live(incident, tensor):
        name = name or expression
        found += writes_in(source, inner, variable, None)
    return ArrayStory(left, name, _distinct(found))


def _distinct(writes: list[ArrayWrite]) -> list[ArrayWrite]:
    known: dict[tuple[str, int, int], ArrayWrite] = {}
    for write in writes:
        known.setdefault((write.source.filename, getattr(write.node, "lineno", 0), getattr(write.node, "col_offset", 0)), write)
    return list(known.values())


def _receivers(place: ResolvedSite) -> list[str]:
    """The variables that hold the array: the statement's targets, if views alone lie between them and the call."""
    statement, node = place.statement, place.node
    if node is None or place.source is None or not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
        return []
    if not isinstance(node, ast.expr):
        return []
    base = peel(node)[0]
    held = [target for target, value in _assigned(statement) if peel(value)[0] is base and not _copies(value)]
    return [name for target in held if (name := dotted(target)) is not None]


def _assigned(statement: ast.Assign | ast.AnnAssign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each target with its value; of an array that is unpacked (`first, second = rows`) with the array, whose parts they are."""
    for target, value in assigned(statement):
        whole = value or statement.value
        if whole is not None and not (value is None and isinstance(whole, (ast.Tuple, ast.List))):
            yield target, whole


def _copies(node: ast.expr) -> bool:
    """Whether a `.copy()` or `.astype()` (a copy by default) stands on the way."""
    return any(item.attr in ("copy", "astype", "clone", "tolist") for item in inside(node, ast.Attribute))


def _live(incident: Incident, tensor: torch.Tensor) -> Iterator[tuple[str, Source, ast.AST, str]]:
    """Arrays in the variables around that lie in the tensor's memory, with the scope in which their name means them."""
    start = tensor.untyped_storage().data_ptr()
    end = start + tensor.untyped_storage().nbytes()
    for view in incident.user_frames:
        place = resolve(view.site)
        if place is None or place.source is None:
            continue
        scope = place.enclosing_function or place.source.tree
        for name, value in list(view.locals.items()):
            if name.startswith("__"):
                continue
            if _lies_in(value, start, end):
                if scope is not None:
                    yield name, place.source, scope, name
            elif not isinstance(value, torch.Tensor):
                for attribute, inner in list(attributes(value).items())[:64]:
                    if _lies_in(inner, start, end):
                        yield from _methods(type(value), f"{name}.{attribute}", attribute)
                        if scope is not None:
                            yield f"{name}.{attribute}", place.source, scope, f"{name}.{attribute}"


def _methods(kind: type, shown: str, attribute: str) -> Iterator[tuple[str, Source, ast.AST, str]]:
    for found in filter(None, map(class_node, kind.__mro__)):
        source, cls = found
        yield from ((shown, source, method, f"self.{attribute}") for method in cls.body if isinstance(method, FUNCTIONS))


def _lies_in(value: Any, start: int, end: int) -> bool:
    if type(value).__module__ != "numpy" or type(value).__name__ != "ndarray":
        return False
    address = int(value.__array_interface__["data"][0])
    return start <= address < end and value.size > 0


def writes_in(source: Source, scope: ast.AST, name: str, after: ResolvedSite | None, depth: int = 3) -> list[ArrayWrite]:
    """In-place statements on a variable in a scope, on its views, and in functions of the file it is passed to; in source order.

    Args:
        after: only what comes after this place, or runs again in a loop around it.
    """
    names = {name}
    for statement in statements_of(scope):
        if isinstance(statement, (ast.For, ast.AsyncFor)):
            names |= names_over(statement, names)
        if isinstance(statement, ast.Assign):
            for target, value in _assigned(statement):
                if not _copies(value) and dotted(peel(value)[0]) in names:
                    names |= {single for part in flatten(target) if (single := dotted(part)) is not None}
    found = []
    for statement in statements_of(scope):
        if after is not None and statement.lineno < after.line and not _in_common_loop(source, statement, after):
            continue
        if after is not None and statement is after.statement:
            continue
        for node, written in _written(source, statement):
            base = dotted(peel(written)[0])
            if base in names:
                found.append(ArrayWrite(source, node, base or name))
        if depth:
            for call in own_calls(statement):
                found += _passed_on(source, call, names, depth - 1)
    return found


def names_over(loop: ast.For | ast.AsyncFor, names: set[str]) -> set[str]:
    """The loop variables that are pieces of one of the arrays."""
    variables = [name for single in flatten(loop.target) if (name := dotted(single)) is not None]
    return {name for name in variables if (given := iterated(loop, name)) is not None and dotted(peel(given)[0]) in names}


def _passed_on(source: Source, node: ast.AST | None, names: set[str] | None, depth: int = 2) -> list[ArrayWrite]:
    """Writes in a function of the file to which one of the names (None: a `.numpy()` call itself) is passed."""
    call, program = node if names is not None else source.parents.get(node) if node is not None else None, program_of(source)
    if not isinstance(call, ast.Call) or program is None:
        return []
    found = []
    for function in program.callees(call):
        for name, value in program.bind(call, function).items() if isinstance(function, FUNCTIONS) else ():
            is_array = isinstance(value, ast.expr) and (
                value is node if names is None else dotted(peel(value)[0]) in names and not _copies(value)
            )
            if is_array and isinstance(function, FUNCTIONS):
                found += writes_in(source, function, name, None, depth)
    return found


def _in_common_loop(source: Source, statement: ast.stmt, after: ResolvedSite) -> bool:
    loops = set(after.enclosing_loops)
    return any(above in loops for above in source.ancestors(statement))


def _written(source: Source, statement: ast.stmt) -> Iterator[tuple[ast.AST, ast.expr]]:
    """What a statement writes into: (the node that writes, the expression written)."""
    for node, written in memory_writes(source, statement):
        if isinstance(node, ast.stmt) or argument(node, "out") is not None:  # tensors' own methods raise the version counter
            yield node, written
    for call in own_calls(statement):
        name = last_part(call)
        if isinstance(call.func, ast.Attribute) and name in _METHODS and dotted(call.func.value) not in ("np", "numpy"):
            yield call, call.func.value
        elif call.args and (name in _FIRST or (name == "nan_to_num" and is_constant(argument(call, "copy"), False))):
            yield call, call.args[0]
