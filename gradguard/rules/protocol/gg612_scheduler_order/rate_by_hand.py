"""A decay written by hand that runs too often: `group["lr"] *= 0.1` for every batch of an epoch. Part of GG612."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import assignments_to
from gradguard.analysis.program.index import calls_in
from gradguard.analysis.program.syntax import FUNCTIONS, Source
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.monitors.optimizer_books import Book
from gradguard.rules import wording
from gradguard.rules.spans import the_one


def told(incident: Incident, book: Book, rate: float, code: str, name: str) -> Diagnosis:
    """The one statement that makes a rate from the rate there is, and the one call of the function that it stands in."""
    optimizer, rates = wording.optimizer_name(book, incident), book.rates
    place = the_one(incident, lambda sources: _cuts(sources))
    function = None if place is None else _function(place)
    call = None if function is None else the_one(incident, lambda sources: _calls(sources, function))
    steps = wording.span(book.step_site, f"`{optimizer}` steps at a rate of {rate:.2g}", "context")
    called = None if call is None else call.statement_span("runs it", "context")
    compounds = place is not None and _compounds(place)
    again = f"`{function}()`" if function is not None else "it" if place is not None else "the statement that cuts the rate"
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"the learning rate (lr) of `{optimizer}` is cut again and again, from {rates.highest:g} to {rate:.2g} within "
        f"{book.steps} steps",
        culprit=None if place is None else place.statement_span("each time it runs, the rate becomes a fraction of what it was", "culprit"),
        related=wording.spans(called, steps),
        explanation=f"{rates.tiny} of {book.steps} steps ran at less than 1/10,000 of the highest rate: nothing is learnt there. No "
        "scheduler drives this optimizer. "
        + (
            f"The rate fell to less than a fifth at {rates.falls} looks in a row, a few steps apart, as a cut does that is meant for an "
            "epoch and made for every batch."
            if not compounds
            else "The factor is a power that grows from epoch to epoch, and it is applied to a rate that earlier factors have cut already."
        ),
        fixes=[
            Fix(
                title="Set the rate in `param_groups` from the first one: `group['lr'] = base * gamma ** (epoch // every)`",
                safety="unsafe",
                detail="Such a factor counts all cuts so far: it belongs to the rate that training began with.",
            )
            if compounds
            else Fix(
                title=f"Run {again} once an epoch, outside the loop over batches",
                safety="unsafe",
                detail="Or set the rate from the epoch alone (`base * gamma ** (epoch // every)`), which may run any number of times; or "
                "use `MultiStepLR`.",
            )
        ],
        confidence="likely",
    )


def _cuts(sources: list[Source]) -> Iterator[tuple[Source, ast.stmt]]:
    """`group["lr"] *= ...`, `/=`, and `group["lr"] = ... group["lr"] ...`."""
    for source in sources:
        for node in ast.walk(source.tree or ast.Module([], [])):
            multiplied = isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Mult, ast.Div)) and _is_rate(node.target)
            made = isinstance(node, ast.Assign) and any(map(_is_rate, node.targets)) and any(map(_is_rate, ast.walk(node.value)))
            if isinstance(node, ast.stmt) and (multiplied or made):
                yield source, node


def _compounds(place: ResolvedSite) -> bool:
    """Whether the factor is a power (`gamma ** (epoch // 30)`), there or where it is computed in the same function."""
    source, statement = place.source, place.statement
    value = getattr(statement, "value", None)
    if source is None or statement is None or value is None:
        return False
    around = next((above for above in source.ancestors(statement) if isinstance(above, FUNCTIONS)), source.tree)
    parts = [value]
    for name in {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}:
        made = assignments_to(around, name) if around is not None else []
        parts += [item.value for item in made if isinstance(item, (ast.Assign, ast.AnnAssign)) and item.value is not None]
    return any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) for part in parts for node in ast.walk(part))


def _is_rate(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value == "lr"


def _function(place: ResolvedSite) -> str | None:
    """The function around a statement, by the name it is called by."""
    if place.source is None or place.statement is None:
        return None
    around = next((above for above in place.source.ancestors(place.statement) if isinstance(above, FUNCTIONS)), None)
    name: str | None = getattr(around, "name", None)
    return name


def _calls(sources: list[Source], function: str | None) -> Iterator[tuple[Source, ast.stmt]]:
    for source, call in calls_in(sources, function) if function is not None else ():
        statement = source.statement(call)
        if statement is not None:
            yield source, statement
