"""A gradient that was set by hand once, and that every step applies again while backward fills others. Part of GG606."""

from __future__ import annotations

import ast

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, at_line, resolve
from gradguard.analysis.program.expressions import is_constant
from gradguard.analysis.program.index import program_of
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.optimizer_books import Book
from gradguard.rules import wording
from gradguard.rules.spans import gradient_writes, the_one

_NAMES = ("grad", "_grad")


def told(incident: Incident, book: Book, code: str, name: str) -> Diagnosis | None:
    """The statement that sets the gradient, or the condition that keeps it from running again."""
    used = [p for p in book.parameters() if p.grad is not None]
    if not used or not any(bool(p.grad.any()) for p in used[:8] if p.grad is not None):
        return None
    optimizer = wording.optimizer_name(book, incident)
    place = the_one(incident, gradient_writes)
    guard = None if place is None else _guard(place)
    culprit = None if place is None else place.statement_span("sets the gradient, and what it set is all that the steps get", "culprit")
    set_once = None
    if place is not None and guard is not None:
        culprit = guard.statement_span("holds from the second time on: the gradient of the first time stays", "culprit")
        set_once = place.statement_span("sets the gradient, once", "context")
        if _asks_for_none(guard):
            culprit = culprit.model_copy(update={"label": "holds only until there is a gradient: that of the first time stays"})
    last = next((call for call in reversed(incident.notes[Ledger].calls()) if call.site is not None), None)
    backward = None if last is None else wording.span(last.site, "fills the gradients of other tensors", "backward")
    step = None if book.step_site is None else resolve(book.step_site)
    function = None if place is None or place.function in (None, "<module>") else place.function
    whose = f" in `{function}`" if function else ""
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"`{optimizer}.step()` applies one and the same gradient at every step: its `.grad` was set by hand{whose}, and nothing "
        "has changed it since",
        culprit=culprit or (None if step is None else step.span("applies the gradient that it has applied before", "culprit")),
        related=wording.spans(set_once, backward, wording.span(book.step_site, "applies it again", "context")),
        tensors=wording.facts(used, incident.names),
        explanation=f"At {book.kept + 1} steps in a row `.grad` of every parameter of `{optimizer}` was the same tensor with the same "
        "values, though backward ran in between. `zero_grad()` sets `.grad` to None unless it is given `set_to_none=False`: a tensor "
        "that two parameters share as their gradient is let go by one of them, and backward makes it a new one.",
        fixes=[
            Fix(
                title="Hand the gradients over after each backward, not only while `.grad` is None",
                safety="unsafe",
                detail="`p.grad = q.grad` for every pair of parameters, at every step.",
            )
        ],
        confidence="likely",
    )


def _guard(place: ResolvedSite) -> ResolvedSite | None:
    """The condition on a gradient that lets the statement run only while there is none."""
    program = program_of(place.source)
    for test, holds in program.conditions(place.statement) if program is not None and place.statement is not None else ():
        if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not is_constant(test.comparators[0], None):
            continue
        if isinstance(test.left, ast.Attribute) and test.left.attr in _NAMES and isinstance(test.ops[0], ast.Is) is holds:
            return at_line(program.source.filename, test.lineno) if program is not None else None
    return None


def _asks_for_none(guard: ResolvedSite) -> bool:
    test = getattr(guard.statement, "test", None)
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is)
