"""Two optimizers that were taken for each other: the step after each backward is that of the one it does not reach. Part of GG602."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, dotted, resolve
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.core.safe_read import peek
from gradguard.instrumentation.facts import BackwardFact
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.ledger_verdicts import ZeroedBeforeStep
from gradguard.monitors.optimizer_books import Book
from gradguard.rules import wording
from gradguard.rules.spans import the_one


def told(
    incident: Incident, finding: ZeroedBeforeStep, code: str, name: str, book: Book, backward: ResolvedSite | None
) -> Diagnosis | None:
    """The diagnosis, where another optimizer stepped right after the backward, and the one it fills steps after another backward."""
    call = finding.part.call
    after = next((fact for fact in incident.journal.steps if fact.clock > call.clock), None)
    other = None if after is None else after.optimizer()
    mine = book.ref()
    theirs = incident.notes[Ledger].books.get(id(other)) if other is not None else None
    if after is None or backward is None or mine is None or theirs is None or other is mine:
        return None
    if _before(incident, after.clock) is not call or _same_call(_before(incident, _last_step(incident, mine)), call):
        return None
    held = {id(p) for p in book.parameters()}
    if any(id(p) in held for p in theirs.parameters()):
        return None
    first, second = _held(incident, book), _held(incident, theirs)
    ours, named = _variables(incident, mine), _variables(incident, other)
    if not first or not second or not ours or not named:
        return None
    unpacked = the_one(incident, lambda sources: _unpackings(sources, set(ours), set(named)))
    step = resolve(after.site)
    target = _targets(unpacked, ours, named)
    label = f"`{target[0]}` is the optimizer of `{first}` here, and `{target[1]}` that of `{second}`" if target else ""
    text = wording.short(backward.text or "backward()", 40)
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"the gradients of `{first}` are cleared unused: the step after this backward is that of the optimizer of `{second}`",
        culprit=unpacked.statement_span(label, "culprit") if unpacked is not None and target else None,
        related=wording.spans(
            backward.span(f"fills the gradients of `{first}`", "backward"),
            None if step is None else step.span(f"steps the optimizer of `{second}`", "context"),
            wording.span(finding.zero, f"clears the gradients of `{first}`", "context"),
        ),
        tensors=wording.facts(book.parameters(), incident.names),
        explanation=f"{finding.count} times what `{text}` added to the gradients of `{first}` was cleared before their optimizer "
        f"stepped. The one that steps right after this backward holds `{second}`; that of `{first}` steps after another backward, and "
        "finds no gradient.",
        fixes=[
            Fix(
                title=f"Step the optimizer of `{first}` after this backward"
                + (f": unpack as `{target[1]}, {target[0]}`, or change the order in which they are given" if target else ""),
                safety="manual" if not target else "unsafe",
            )
        ],
        confidence="certain" if unpacked is not None and target else "likely",
    )


def _last_step(incident: Incident, optimizer: Any) -> int:
    """When an optimizer stepped last; 0 where that is forgotten."""
    return next((fact.clock for fact in reversed(incident.journal.steps) if fact.optimizer() is optimizer), 0)


def _before(incident: Incident, clock: int) -> BackwardFact | None:
    """The last backward call before a moment."""
    return next((fact for fact in reversed(incident.journal.backwards) if fact.clock < clock and not fact.nested), None)


def _same_call(one: BackwardFact | None, other: BackwardFact) -> bool:
    """Whether two backward calls are one statement's, reached in the same way; of one that is forgotten it may be so."""
    return one is None or (one.site, one.stack) == (other.site, other.stack)


def _held(incident: Incident, book: Book) -> str | None:
    """What the parameters of an optimizer have in common: `self.critic`."""
    return wording.common_prefix([f"{name}.x" for name in {path.rpartition(".")[0] for path in _paths(incident, book)}]) or None


def _paths(incident: Incident, book: Book) -> list[str]:
    return wording.parameter_names(book.parameters(), incident.names)


def _variables(incident: Incident, optimizer: Any) -> list[str]:
    """The variables that hold an optimizer, or a framework's wrapper of it."""
    return [name for name, value in incident.names.bindings if value is optimizer or peek(value, "optimizer", None) is optimizer]


def _unpackings(sources: list[Source], ours: set[str], theirs: set[str]) -> Iterator[tuple[Source, ast.stmt]]:
    for source in sources:
        for node in ast.walk(source.tree or ast.Module([], [])):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Tuple, ast.List)):
                names = {dotted(item) for item in node.targets[0].elts}
                if names & ours and names & theirs:
                    yield source, node


def _targets(place: ResolvedSite | None, ours: list[str], theirs: list[str]) -> tuple[str, str] | None:
    """The two variables of the unpacking statement: ours, and the other's."""
    statement = None if place is None else place.statement
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], (ast.Tuple, ast.List)):
        return None
    names = [dotted(item) for item in statement.targets[0].elts]
    mine, other = next((n for n in names if n in ours), None), next((n for n in names if n in theirs), None)
    return (mine, other) if mine is not None and other is not None and len(names) == 2 else None
