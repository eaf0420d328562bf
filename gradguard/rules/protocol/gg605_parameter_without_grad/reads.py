"""Where a class reads its own attributes, and whether it only ever reads their bare values. Part of GG605."""

from __future__ import annotations

import ast
from typing import NamedTuple

from gradguard.analysis.places.source import ResolvedSite, at_line, dotted
from gradguard.analysis.program.syntax import Source
from gradguard.rules.spans import class_node

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
    """Reads of `self.<name>` in a class outside `__init__`; None where the class reads attributes by computed names."""
    found = class_node(kind)
    if found is None:
        return None
    reads: dict[str, list[ast.Attribute]] = {}
    for method in found[1].body:
        if not isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) or method.name == "__init__":
            continue
        for node in ast.walk(method):
            if isinstance(node, ast.Call) and dotted(node.func) in (
                "getattr",
                "self.children",
                "self.named_children",
                "self.modules",
                "self.named_modules",
                "self.get_submodule",
                "self._modules.values",
            ):
                return None
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and dotted(node) == f"self.{node.attr}":
                reads.setdefault(node.attr, []).append(node)
    return reads
