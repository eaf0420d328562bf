"""Where a loop's values come from: what a generator yields, what a DataLoader's dataset makes of an index."""

from __future__ import annotations

import ast
from types import FunctionType, MethodType
from typing import Any

from gradguard.analysis.places.source import ResolvedSite, dotted
from gradguard.analysis.program.expressions import inside
from gradguard.core.safe_read import in_class, peek
from gradguard.rules.numerics.gg501_nonfinite_forward.nonfinite_expressions import Search

_WRAPPED = 4  # datasets around datasets


def behind_delivery(search: Search, place: ResolvedSite, name: str, elements: int) -> ResolvedSite | None:
    """The one expression on the way to a loop's variable that can make a non-finite value of finite ones.

    Args:
        place: of the `for` statement.
        name: the variable that is not finite.
        elements: how many of a tensor a deviation over all of it is taken of, at least.
    """
    loop = place.statement
    if not isinstance(loop, (ast.For, ast.AsyncFor)):
        return None
    search.of_one = elements < 2
    found = _found(search, loop, name)
    if found is None:
        return None
    search.again(found)
    return found if _found(search, loop, name) is None else None  # of several, none is known to be it


def _found(search: Search, loop: ast.For | ast.AsyncFor, name: str) -> ResolvedSite | None:
    for node in inside(loop.iter, ast.Call, ast.Name, ast.Attribute):
        called = search.named(node.func if isinstance(node, ast.Call) else node)
        if not isinstance(node, ast.Call):
            found = _of_dataset(search, called, _part(loop.target, name))
        else:
            found = search.given_back(called, part=_part(loop.target, name)) if callable(called) else None
        if found is not None:
            return found
    return None


def _part(target: ast.expr, name: str) -> tuple[int, int] | None:
    """Which of how many items a loop's variable is; behind `enumerate`, those of the inner tuple."""
    unpacked = ([dotted(item) for item in node.elts] for node in inside(target, ast.Tuple))
    return next(((names.index(name), len(names)) for names in unpacked if name in names), None)


def _of_dataset(search: Search, loader: Any, part: tuple[int, int] | None) -> ResolvedSite | None:
    dataset = peek(loader, "dataset", None)
    for _ in range(_WRAPPED):
        method = in_class(type(dataset), "__getitem__")
        if isinstance(method, FunctionType):
            found = search.given_back(MethodType(method, dataset), part=part)
            if found is not None:
                return found
        dataset = peek(dataset, "dataset", None)
    return None
