"""A freeze that also meets what was put in to be trained: layers whose weights begin with zero, and so give nothing. Part of GG605."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import StateName
from gradguard.analysis.places.source import resolve
from gradguard.analysis.program.index import program_of
from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.optimizer_books import Book
from gradguard.monitors.surveys import FrozenAtZero
from gradguard.rules import wording


@dataclass(frozen=True)
class Frozen:
    """Parameters that one statement froze at zero, what holds them, and how many others it froze."""

    parameters: list[torch.Tensor]
    states: list[StateName]
    site: CallSite
    called: CallSite | None


def find(incident: Incident) -> Frozen | None:
    """Those whose module runs with grad mode on, and that are not in a frozen copy of what is trained."""
    finding: FrozenAtZero = incident.finding
    ledger = incident.notes[Ledger]
    called = ledger.called
    trained = {
        _place(state, p)
        for book in ledger.books.values()
        for p in book.parameters()
        if p.requires_grad and (state := incident.names.state(p))
    }
    found: dict[CallSite, Frozen] = {}
    for parameter in (p for ref in finding.parameters if (p := ref()) is not None):
        state, switch = incident.names.state(parameter), incident.journal.toggle_of(parameter)
        call = None if state is None else called.get(id(state.owner))
        if state is None or switch is None or switch[1] is None or call is None or call[0]() is not state.owner or not call[2]:
            continue
        if _place(state, parameter) in trained:
            continue
        each = found.setdefault(switch[1], Frozen([], [], switch[1], call[1]))
        each.parameters.append(parameter)
        each.states.append(state)
    return max(found.values(), key=lambda each: len(each.parameters), default=None)


def _place(state: StateName, parameter: torch.Tensor) -> tuple[object, ...]:
    return type(state.owner), tuple(state.path.split(".")[-2:]), tuple(parameter.shape)


def switched_on_elsewhere(incident: Incident, site: CallSite) -> bool:
    """Whether another statement of the program may switch requires_grad on: in a later stage of training."""
    freeze = resolve(site)
    for source in incident.sources:
        program = program_of(source)
        for write in () if program is None else program.writes("requires_grad", True):
            if freeze is None or source.statement(write.node) is not freeze.statement:
                return True
    return False


def render(found: Frozen, incident: Incident, code: str, name: str) -> Diagnosis:
    """The freeze is the culprit."""
    place = resolve(found.site)
    paths = [state.full for state in found.states]
    listed = wording.listed(paths, len(paths))
    many = len(paths) > 1
    book: Book = incident.finding.book
    held = {id(p) for p in book.parameters()}
    has = all(id(p) in held for p in found.parameters)
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"{listed} {'are' if many else 'is'} frozen with all values zero: what {'they give' if many else 'it gives'} is 0 "
        "in every step",
        culprit=None if place is None else place.statement_span(f"freezes {listed} too", "culprit"),
        related=wording.spans(
            wording.span(found.called, "called here", "context"),
            wording.span(book.made, "has them, and can't change them" if has else "does not get them", "declared"),
        ),
        tensors=wording.facts(found.parameters, incident.names),
        explanation="A layer whose weight begins with zero changes nothing until it is trained. The statement that freezes "
        f"{'these weights' if many else 'this weight'} freezes others as well. If a filter by name or type was to leave out what is "
        "trained, it does not match the names or types that these layers have.",
        fixes=[
            Fix(
                title=f"Leave {listed} out of the freeze, before the optimizer is made",
                safety="unsafe",
                detail=f"And what else of `{type(found.states[0].owner).__name__}` is to be trained.",
            )
        ],
        confidence="likely",
    )
