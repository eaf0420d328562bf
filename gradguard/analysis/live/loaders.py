"""The DataLoader whose batches a step is taken on."""

from __future__ import annotations

import ast
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import Loop, ResolvedSite, module_ast, resolve, span_of
from gradguard.analysis.program.expressions import inside, last_part
from gradguard.analysis.program.user_calls import calls
from gradguard.core.diagnosis import SourceSpan
from gradguard.core.safe_read import peek


class Loader(NamedTuple):
    """One that a loop around the step goes through.

    Attributes:
        name: the variable.
        sampler: what orders its samples.
        place, loop: the step, and the loop around it.
    """

    name: str
    sampler: Any
    place: ResolvedSite
    loop: Loop

    def header(self, label: str) -> SourceSpan | None:
        """The loop's first line, as the culprit."""
        loop = self.loop
        end = loop.test if isinstance(loop, ast.While) else loop.iter
        span = (loop.lineno, loop.col_offset, end.end_lineno or loop.lineno, end.end_col_offset or 0)
        return None if self.place.source is None else self.place.source.span(span, label, "culprit")


def around(incident: Incident) -> Loader | None:
    """The innermost loader."""
    for view in incident.user_frames:
        place = resolve(view.site)
        for loop in place.enclosing_loops if place is not None else ():
            for name in [node.id for node in inside(loop.iter, ast.Name)] if isinstance(loop, ast.For) else []:
                value = view.locals.get(name)
                if type(value) is DataLoader and place is not None:
                    return Loader(name, peek(value, "sampler", None), place, loop)
    return None


def made(incident: Incident, name: str, callee: str, label: str) -> SourceSpan | None:
    """The one call of a class whose result goes to a variable of this name."""
    found = []
    for file, call in calls(incident, callee):
        assigned = [node for node in inside(module_ast(file), ast.Assign) if node.value is call]
        if any(last_part(target) == name for node in assigned for target in node.targets):
            found.append((file, call))
    return span_of(*found[0], label=label, role="culprit") if len(found) == 1 else None
