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
from gradguard.analysis.program.index import assigned
from gradguard.analysis.program.syntax import FUNCTIONS, Source, header_range, load, range_of
from gradguard.analysis.program.user_files import file_of_class
from gradguard.core.diagnosis import SourceSpan
from gradguard.core.safe_read import attributes
from gradguard.instrumentation.facts import Prints
from gradguard.rules.inplace.aliases import iterated_by, parameters_of, peel

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
        statement = self.source.statement(self.node)
        place = range_of(self.node) if isinstance(self.node, ast.expr) else header_range(statement) if statement is not None else None
        return self.source.span(place or (1, 0, 1, 1), label, "culprit", self.source.qualname_around(statement or self.node))


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
    return any(isinstance(item, ast.Attribute) and item.attr in ("copy", "astype", "clone", "tolist") for item in ast.walk(node))


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
    for cls in kind.__mro__:
        path = file_of_class(cls)
        source = load(path) if path else None
        if source is None or source.tree is None:
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
                for item in node.body:
                    if isinstance(item, FUNCTIONS):
                        yield shown, source, item, f"self.{attribute}"


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
    for statement in _statements(scope):
        if isinstance(statement, (ast.For, ast.AsyncFor)):
            names |= names_over(statement, names)
        if isinstance(statement, ast.Assign):
            for target, value in _assigned(statement):
                if not _copies(value) and dotted(peel(value)[0]) in names:
                    names |= {single for part in flatten(target) if (single := dotted(part)) is not None}
    found = []
    for statement in _statements(scope):
        if after is not None and statement.lineno < after.line and not _in_common_loop(source, statement, after):
            continue
        if after is not None and statement is after.statement:
            continue
        for node, written in _written(statement):
            base = dotted(peel(written)[0])
            if base in names:
                found.append(ArrayWrite(source, node, base or name))
        if depth:
            for item in _own(statement):
                if isinstance(item, ast.Call):
                    found += _passed_on(source, item, names, depth - 1)
    return found


def names_over(loop: ast.For | ast.AsyncFor, names: set[str]) -> set[str]:
    """The loop variables that are pieces of one of the arrays."""
    found = set()
    for single in flatten(loop.target):
        variable = dotted(single)
        iterated = None if variable is None else iterated_by(loop, variable)
        if variable is not None and iterated is not None and dotted(peel(iterated)[0]) in names:
            found.add(variable)
    return found


def _passed_on(source: Source, node: ast.AST | None, names: set[str] | None, depth: int = 2) -> list[ArrayWrite]:
    """Writes in a function of the file to which one of the names (None: a `.numpy()` call itself) is passed."""
    call = node if names is not None else source.parents.get(node) if node is not None else None
    if not isinstance(call, ast.Call):
        return []
    called = (dotted(call.func) or "").rpartition(".")[2]
    function = next(
        (item for item in source.scopes if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)) and item.name == called), None
    )
    if function is None:
        return []
    parameters = parameters_of(function)
    skip = 1 if parameters[:1] in (["self"], ["cls"]) else 0
    found = []
    for index, argument in enumerate(call.args):
        match = argument is node if names is None else dotted(peel(argument)[0]) in names and not _copies(argument)
        if match and index + skip < len(parameters):
            found += writes_in(source, function, parameters[index + skip], None, depth)
    for keyword in call.keywords:
        match = keyword.value is node if names is None else dotted(peel(keyword.value)[0]) in names and not _copies(keyword.value)
        if match and keyword.arg in parameters:
            found += writes_in(source, function, keyword.arg or "", None, depth)
    return found


def _statements(scope: ast.AST) -> list[ast.stmt]:
    """The statements of a scope in source order, without those of inner functions and classes."""
    found: list[ast.stmt] = []

    def walk(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
                continue
            if isinstance(child, ast.stmt):
                found.append(child)
            walk(child)

    walk(scope)
    return sorted(found, key=lambda item: (item.lineno, item.col_offset))


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement itself, without those of statements inside it."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt):
            yield from (item for item in ast.walk(child) if not isinstance(item, ast.stmt))


def _in_common_loop(source: Source, statement: ast.stmt, after: ResolvedSite) -> bool:
    loops = set(after.enclosing_loops)
    return any(above in loops for above in source.ancestors(statement))


def _written(statement: ast.stmt) -> Iterator[tuple[ast.AST, ast.expr]]:
    """What a statement writes into: (the node that writes, the expression written)."""
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            for single in flatten(target):
                if isinstance(single, ast.Subscript):
                    yield statement, single.value
    elif isinstance(statement, ast.AugAssign):
        yield statement, statement.target
    for node in _own(statement):
        if not isinstance(node, ast.Call):
            continue
        out = next((keyword.value for keyword in node.keywords if keyword.arg == "out"), None)
        if out is not None:
            for single in flatten(out):
                yield node, single
        if isinstance(node.func, ast.Attribute):
            if node.func.attr in _METHODS and (dotted(node.func.value) or "") not in ("np", "numpy"):
                yield node, node.func.value
            elif (node.func.attr in _FIRST and node.args) or (
                node.func.attr == "nan_to_num"
                and node.args
                and any(
                    keyword.arg == "copy" and isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                    for keyword in node.keywords
                )
            ):
                yield node, node.args[0]
