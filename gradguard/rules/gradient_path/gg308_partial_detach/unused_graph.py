"""What is computed to be differentiated, and that no loss is made of: gradients that have a graph, results of custom Functions. Part of
GG308."""

from __future__ import annotations

import ast

from gradguard.analysis.history.dead_ends import DeadEnd, dead_end
from gradguard.analysis.places.sites import short
from gradguard.analysis.places.source import resolve
from gradguard.analysis.program.index import only, program_of
from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.edits import replaced
from gradguard.monitors.undifferentiated import UnusedGraph


def told(finding: UnusedGraph) -> Diagnosis | None:
    """The statement after which nothing can use the value; silent where something may, in other steps."""
    function = finding.made.function
    end = dead_end(_within(finding), unchanged=function is not None)
    if end is None:
        return None
    return _gradients(finding, end) if function is None else _function(finding, end, function.__name__)


def _within(finding: UnusedGraph) -> list[CallSite]:
    """The calls around the making, out to the one in the function that calls backward."""
    around, found = {site.code for site in finding.backward.stack}, list[CallSite]()
    for site in finding.made.stack:
        found.append(site)
        if site.code in around:
            break
    return found


def _gradients(finding: UnusedGraph, end: DeadEnd) -> Diagnosis:
    place, subject, many = end.place, _subject(end), len(end.names) > 1
    inner, loss = resolve(finding.made.stack[0]), resolve(finding.backward.site)
    return Diagnosis(
        code="GG308",
        name="partial-detach",
        severity="warning",
        headline=f"{subject} {'are' if many else 'is'} computed to be differentiated, and nothing uses "
        f"{'them' if many else 'it'}: no loss contains {'these terms' if many else 'this term'}",
        culprit=place.statement_span("its gradients are taken with create_graph=True, and nothing reads the value", "culprit"),
        related=[
            *([] if inner is None or inner.line == place.line else [inner.span("takes gradients that have a graph of their own", "made")]),
            *([] if loss is None else [loss.span("starts from a loss without it", "backward")]),
        ],
        explanation="`create_graph=True` costs time and memory to make gradients that a further backward() can go through. In the traced "
        "steps no backward() and no other `autograd.grad` went through these.",
        fixes=[Fix(title=f"Add {subject}, times its weight, to the loss that backward() starts from", safety="unsafe")],
    )


def _function(finding: UnusedGraph, end: DeadEnd, function: str) -> Diagnosis:
    place, subject = end.place, _subject(end)
    inner, loss = resolve(finding.made.stack[0]), resolve(finding.backward.site)
    what = f"the result of `{function}`, which nothing reads" if end.names else f"drops what `{function}` gives"
    return Diagnosis(
        code="GG308",
        name="partial-detach",
        severity="warning",
        headline=f"{subject} has gone through `{function}`, and nothing uses it: the backward of `{function}` never runs",
        culprit=place.statement_span(what, "culprit"),
        related=[
            *([] if inner is None or inner.line == place.line else [inner.span("applied here", "made")]),
            *([] if loss is None else [loss.span("starts from a loss without it", "backward")]),
        ],
        explanation=f"A custom Function acts on gradients that flow through its result. Backward went through no node of `{function}` that "
        "this line has made in the traced steps: what follows uses the value from before it.",
        fixes=[_use(end, function)],
        confidence="likely",
    )


def _use(end: DeadEnd, function: str) -> Fix:
    """The result in place of what went in, where one later line reads that."""
    call, program = end.place.call, program_of(end.place.source)
    given = next((each for each in call.args if isinstance(each, ast.Name)), None) if call is not None else None
    name = only(end.names)
    if given is None or name is None or program is None:
        return Fix(title=f"Compute the loss from {_subject(end)}", safety="unsafe")
    later = [read for each in program.reaching(given) for read in program.uses(each) if read.lineno > end.place.end_line]
    lines = sorted({read.lineno for read in later})
    where = f" in line {lines[0]}" if len(lines) == 1 else f" where the backward of `{function}` is to act"
    patch = replaced(program.source, [(read, name) for read in later]) if len(later) == 1 else None
    return Fix(title=f"Use `{name}` in place of `{given.id}`{where}", safety="unsafe", patch=patch)


def _subject(end: DeadEnd) -> str:
    return " and ".join(f"`{name}`" for name in end.names) or f"the result of `{short(end.place.text, 40)}`"
