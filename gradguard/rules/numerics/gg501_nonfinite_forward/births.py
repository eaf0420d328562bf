"""Where a parameter that was never finite was made: the one statement that sets it in its module's class, and what that computes."""

from __future__ import annotations

import ast

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import StateName
from gradguard.analysis.live.stores import classes_of
from gradguard.analysis.places.source import ResolvedSite, at_line
from gradguard.analysis.program.bindings import assignments_to
from gradguard.core.diagnosis import SourceSpan
from gradguard.core.safe_read import peek
from gradguard.rules.numerics.gg501_nonfinite_forward.nonfinite_expressions import Search
from gradguard.torch_compat.private_api import version_of


def birthplace(incident: Incident, state: StateName | None, search: Search) -> tuple[ResolvedSite | None, str, list[SourceSpan]]:
    """The expression that can have made a parameter non-finite, its label, and where the parameter is made.

    Returns:
        no place where the statement computes nothing that can leave its domain, or the weights were initialised or loaded since.
    """
    if state is None or state.is_buffer:
        return None, "", []
    name = f"self.{state.path.rpartition('.')[2]}"
    made = [
        (source.filename, statement)
        for source, definition in classes_of(state.owner)
        for statement in assignments_to(definition, name)
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None
    ]
    place = at_line(made[0][0], made[0][1].lineno) if len(made) == 1 else None
    if place is None:
        return None, "", []
    inner = search.statement(place)
    parameter = peek(state.owner, state.path.rpartition(".")[2], None)
    if inner is None or not isinstance(parameter, torch.Tensor) or version_of(parameter) != 0:  # written since: initialised, or loaded
        return None, "", [place.span(f"`{state.full}` is made here", "made")]
    related = [] if (inner.file, inner.line) == (place.file, place.line) else [place.span(f"`{state.full}` is made of it here", "made")]
    return inner, "this can overflow, divide by zero or leave its domain", related
