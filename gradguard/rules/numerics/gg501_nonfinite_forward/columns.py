"""Data whose bad values fill whole columns: a feature that is constant where it was standardised."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, dotted
from gradguard.analysis.program.syntax import Source
from gradguard.rules.spans import the_one

_DEVIATIONS = frozenset({"std", "nanstd"})


def bad_columns(tensor: torch.Tensor) -> list[int]:
    """The columns of a table that hold all of its bad values and nothing else; none where values are bad in another pattern."""
    if tensor.dim() != 2 or tensor.shape[0] < 2 or not tensor.is_floating_point():
        return []
    with torch.no_grad():
        bad = ~torch.isfinite(tensor)
        whole = bad.all(dim=0)
        return [int(i) for i in whole.nonzero().flatten()] if bool((bad.any(dim=0) == whole).all()) and not bool(whole.all()) else []


def listed(columns: list[int]) -> str:
    """`column 2`; `columns 2 and 5`."""
    if len(columns) == 1:
        return f"column {columns[0]}"
    shown = [str(column) for column in columns[:5]]
    return f"columns {', '.join(shown[:-1])} and {shown[-1]}" if len(columns) <= 5 else f"{len(columns)} columns"


def standardised(incident: Incident) -> ResolvedSite | None:
    """The one statement around that divides by a bare standard deviation."""
    return the_one(incident, _divisions)


def _divisions(sources: list[Source]) -> Iterator[tuple[Source, ast.stmt]]:
    for source in sources:
        nodes = list(ast.walk(source.tree or ast.Module([], [])))
        named = {name for node in nodes if isinstance(node, ast.Assign) for name in _deviations(node)}
        for node in nodes:
            divisor = None
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                divisor = node.right
            elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
                divisor = node.value
            statement = source.statement(node) if divisor is not None else None
            if statement is not None and divisor is not None and (_is_deviation(divisor) or (dotted(divisor) or "") in named):
                yield source, statement


def _deviations(node: ast.Assign) -> Iterator[str]:
    """What an assignment calls a standard deviation."""
    for target in node.targets:
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple) and len(target.elts) == len(node.value.elts):
            pairs = list(zip(target.elts, node.value.elts, strict=True))
        for part, value in pairs:
            name = dotted(part)
            if name is not None and _is_deviation(value):
                yield name


def _is_deviation(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _DEVIATIONS
