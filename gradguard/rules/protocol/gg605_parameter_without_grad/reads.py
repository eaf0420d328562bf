"""Where a class reads its own attributes, and whether it only ever reads their bare values. Part of GG605."""

from __future__ import annotations

import ast
import builtins
from typing import NamedTuple

from gradguard.analysis.places.source import ResolvedSite, at_line, dotted
from gradguard.analysis.program.index import UNKNOWN, Program, program_of
from gradguard.analysis.program.syntax import FUNCTIONS, Function, Source
from gradguard.rules.spans import class_node

_LISTS = ("children", "named_children", "modules", "named_modules", "get_submodule", "_modules.values")
_VALUES = frozenset({"data", "detach"})
_NUMBERS = frozenset({"item", "tolist", "numpy"})


class BareRead(NamedTuple):
    """The first of an attribute's reads, all of which drop the graph.

    Attributes:
        how: what drops it, such as `.item()`.
        number: whether it leaves torch.
        detail: what has to change besides.
    """

    place: ResolvedSite
    attribute: str
    how: str
    number: bool
    detail: str | None


def bare_read(kind: type, attribute: str) -> BareRead | None:
    """None where the class does not read the attribute, or reads it with its graph anywhere."""
    nodes = (reads_of(kind) or {}).get(attribute, [])
    found = class_node(kind) if nodes else None
    if found is None:
        return None
    source = found[0]
    cuts = [_cut(source, node) for node in nodes]
    place = at_line(source.filename, nodes[0].lineno)
    if place is None or cuts[0] is None or any(cut is None for cut in cuts):
        return None
    how, number, compared = cuts[0]
    detail = f"Python's `{compared}` becomes `.clamp({'max' if compared == 'min' else 'min'}=...)`." if compared else None
    return BareRead(place, attribute, how, number, detail)


def _cut(source: Source, node: ast.AST) -> tuple[str, bool, str] | None:
    """What drops the graph of an expression, whether a number is what is left, and Python's `min` or `max` around that."""
    how, number, below = "", False, node
    for above in source.ancestors(node):
        if isinstance(above, ast.Call) and below is not above.func:
            function = dotted(above.func) or ""
            if how:
                return how, number, function if function in ("min", "max") else ""
            if function in ("float", "int") or function.startswith("math."):
                how, number = f"{function}()", True
        elif isinstance(above, ast.Attribute) and not how and above.attr in _VALUES | _NUMBERS:
            number = above.attr in _NUMBERS
            how = f".{above.attr}" + ("()" if number else "")
        elif not isinstance(above, (ast.Attribute, ast.Call, ast.UnaryOp)):
            break
        below = above
    return (how, number, "") if how else None


def reads_of(kind: type) -> dict[str, list[ast.Attribute]] | None:
    """Reads of a class's own attributes outside `__init__`, in functions of its file that an object is handed to as well; None where
    attributes are read by computed names, or an object goes where that is not known."""
    found = class_node(kind)
    program = None if found is None else program_of(found[0])
    if found is None or program is None:
        return None
    reads: dict[str, list[ast.Attribute]] = {}
    methods = [each for each in found[1].body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) and each.name != "__init__"]
    pending: list[tuple[Function, str]] = [(method, "self") for method in methods]
    seen = set(pending)
    while pending:
        body, owner = pending.pop()
        for node in ast.walk(body):
            if isinstance(node, ast.Call):
                if dotted(node.func) in ("getattr", *(f"{owner}.{each}" for each in _LISTS)):
                    return None
                handed = _handed(program, node, owner)
                if handed is None:
                    return None
                pending += [each for each in handed if each not in seen]
                seen.update(handed)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and dotted(node) == f"{owner}.{node.attr}":
                reads.setdefault(node.attr, []).append(node)
    return reads


def _handed(program: Program, call: ast.Call, owner: str) -> list[tuple[Function, str]] | None:
    """The functions that a call gives the object to, and what they call it; None where it may go elsewhere than to torch's and Python's."""
    if not any(isinstance(each, ast.Name) and each.id == owner for each in (*call.args, *(word.value for word in call.keywords))):
        return []
    callees = program.callees(call)
    names = program.names_of(call.func)
    if UNKNOWN in callees and not all(name.startswith("torch.") or name in vars(builtins) for name in names):
        return None
    found: list[tuple[Function, str]] = []
    for function in (each for each in callees if isinstance(each, FUNCTIONS)):
        bound = program.bind(call, function).items()
        found += [(function, name) for name, given in bound if isinstance(given, ast.Name) and given.id == owner]
    return found
