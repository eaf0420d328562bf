"""Data whose bad values fill whole columns: a feature that is constant where it was standardised."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.index import programs_of
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
    for program in programs_of(sources):
        for node in inside(program.source.tree, ast.BinOp, ast.AugAssign) if any(map(program.mentions, _DEVIATIONS)) else ():
            divisor = node.right if isinstance(node, ast.BinOp) else node.value
            statement = program.source.statement(node)
            kept = program.writes(divisor.attr) if isinstance(divisor, ast.Attribute) else ()
            made = [*program.values(divisor), *(write.value for write in kept)]
            if isinstance(node.op, ast.Div) and statement is not None and any(map(_is_deviation, made)):
                yield program.source, statement


def _is_deviation(node: object) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _DEVIATIONS
