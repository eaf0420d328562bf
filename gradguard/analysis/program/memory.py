"""Which memory an expression is, and which statements write into it, as far as the source tells."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from gradguard.analysis.program.bindings import dotted, flatten, full_name
from gradguard.analysis.program.expressions import argument, is_constant, last_part
from gradguard.analysis.program.index import UNKNOWN, Definition, Program
from gradguard.analysis.program.syntax import FUNCTIONS, Source
from gradguard.torch_compat.op_schemas import is_in_place, view_names

_LIBRARIES = ("torch", "np", "numpy", "einops", "F")
_ITEMS = ("enumerate", "zip", "reversed", "iter", "list", "tuple")
_ATTRIBUTES = ("T", "mT", "H", "mH", "data", "real", "imag")
_WRITES_NO_VALUES = ("requires_grad_", "share_memory_")


class MemoryWrite(NamedTuple):
    """A statement, or a call, that writes into what an expression is."""

    node: ast.Assign | ast.AugAssign | ast.Call
    written: ast.expr


def peel(node: ast.expr) -> tuple[ast.expr, list[str]]:
    """The expression under views, in-place calls and subscripts, and the names of those, outermost first."""
    calls: list[str] = []
    while True:
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute) and (_is_view(function.attr) or _names_in_place(function.attr)):
                calls.append(function.attr)
                library = isinstance(function.value, ast.Name) and function.value.id in _LIBRARIES
                if library and not node.args:
                    return node, calls
                node = node.args[0] if library else function.value
            elif isinstance(function, ast.Name) and function.id in ("rearrange", "from_numpy", *_ITEMS) and node.args:
                calls.append("for" if function.id in _ITEMS else function.id)
                node = node.args[0]
            else:
                return node, calls
        elif isinstance(node, ast.Subscript):
            calls.append("[]")
            node = node.value
        elif isinstance(node, ast.Attribute) and node.attr in _ATTRIBUTES:
            calls.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Starred):
            node = node.value
        else:
            return node, calls


def _is_view(name: str) -> bool:
    return name in view_names() or name == "rearrange"


def _names_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and not name.startswith("_")


def bases(program: Program, expr: ast.expr) -> set[Definition]:
    """The definitions whose memory an expression can be: views, plain assignments and in-place operators are followed."""
    found: set[Definition] = set()
    seen: set[ast.expr] = set()
    pending = [expr]
    while pending:
        base = peel(pending.pop())[0]
        if base in seen:
            continue
        seen.add(base)
        for definition in program.reaching(base) if isinstance(base, ast.Name) else ():
            value = definition.value if definition.kind == "assign" and not definition.path else None
            if value is not None and isinstance(peel(value)[0], ast.Name):
                pending.append(value)
            elif definition.kind == "augmented" and isinstance(definition.node, ast.Name):
                pending.append(definition.node)
            elif definition is not UNKNOWN:
                found.add(definition)
    return found


def iterated(loop: ast.For | ast.AsyncFor, name: str) -> ast.expr | None:
    """What a variable of a loop runs over: of `zip` and `enumerate` the argument in its place; None of a counter, or of no variable of
    the loop's."""
    value: ast.expr | None = loop.iter
    target = loop.target
    while isinstance(value, ast.Call) and isinstance(target, (ast.Tuple, ast.List)) and last_part(value) in ("enumerate", "zip"):
        given = value.args if last_part(value) == "zip" else [None, *value.args[:1]]
        found = [pair for pair in zip(target.elts, given, strict=False) if name in _names(pair[0])]
        target, value = found[0] if found else (target, None)
    return value if name in _names(target) and not isinstance(value, ast.Starred) else None


def _names(target: ast.expr) -> list[str | None]:
    return [dotted(single) for single in flatten(target)]


def statements_of(scope: ast.AST) -> list[ast.stmt]:
    """The statements below a node in source order, without those of inner functions and classes."""
    found: list[ast.stmt] = []
    pending = list(ast.iter_child_nodes(scope))
    while pending:
        node = pending.pop()
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            found += [node] if isinstance(node, ast.stmt) else []
            pending += ast.iter_child_nodes(node)
    return sorted(found, key=lambda item: (item.lineno, item.col_offset))


def own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement itself, without those of statements inside it."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt):
            yield from (item for item in ast.walk(child) if not isinstance(item, ast.stmt))


def own_calls(statement: ast.stmt) -> list[ast.Call]:
    """The calls of a statement itself."""
    return [node for node in own_nodes(statement) if isinstance(node, ast.Call)]


def memory_writes(source: Source, statement: ast.stmt) -> Iterator[MemoryWrite]:
    """What a statement itself writes into: `x[i] = v`, `x += v`, `x.add_(v)`, `F.relu(x, inplace=True)`, `torch.add(a, b, out=x)`."""
    if isinstance(statement, ast.AugAssign):
        yield MemoryWrite(statement, statement.target)
    elif isinstance(statement, ast.Assign):
        singles = (single for target in statement.targets for single in flatten(target))
        yield from (MemoryWrite(statement, single) for single in singles if isinstance(single, ast.Subscript))
    for call in own_calls(statement):
        yield from (MemoryWrite(call, written) for written in _written_by(source, call))


def _written_by(source: Source, call: ast.Call) -> list[ast.expr]:
    out = argument(call, "out")
    if out is not None:
        return flatten(out)
    name = last_part(call)
    if is_in_place(name) and isinstance(call.func, ast.Attribute):
        if name in _WRITES_NO_VALUES:
            return []
        library = full_name(source, dotted(call.func.value) or "").partition(".")[0] == "torch"
        return call.args[:1] if library else [call.func.value]
    return call.args[:1] if is_constant(argument(call, "inplace"), True) else []
