"""Frozen parameters that a switch of the whole network's requires_grad turns on again, step after step (GANs do so)."""

from __future__ import annotations

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import resolve
from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.monitors.optimizer_books import Book
from gradguard.rules import wording

_TIMES = 3  # changes of one parameter's requires_grad that were seen: on, off, on again


def unfrozen(incident: Incident, book: Book, moved: set[int]) -> Diagnosis | None:
    """Some were frozen when the optimizer was made and some were not; one statement switches all of them, and all are trained.

    Where all were frozen then, the switch is what trains them; where only the frozen ones are switched, they are meant.
    """
    frozen = [p for ref in book.frozen_at_first if (p := ref()) is not None and id(p) in moved and p.requires_grad]
    known = {id(p) for p in frozen}
    others = [p for p in book.parameters() if id(p) not in known and id(p) in moved]
    if not frozen or not others or len(frozen) < len(book.frozen_at_first):
        return None
    journal = incident.journal
    sites = {_switched_at(incident, parameter) for parameter in frozen}
    site = sites.pop() if len(sites) == 1 else None
    if site is None or min(journal.times_toggled(parameter) for parameter in frozen) < _TIMES:
        return None
    beside = [p for p in others if _switched_at(incident, p) == site and journal.times_toggled(p) >= _TIMES - 1]
    place = resolve(site)
    if not beside or place is None:
        return None
    name = wording.optimizer_name(book, incident)
    names, rest = wording.parameter_names(frozen, incident.names), wording.parameter_names(beside, incident.names)
    shown = wording.listed(names, len(frozen))
    return Diagnosis(
        code="GG613",
        name="unintended-training",
        severity="warning",
        headline=f"{shown} {'were' if len(frozen) > 1 else 'was'} frozen when `{name}` was made, and "
        f"{'are' if len(frozen) > 1 else 'is'} trained: a switch for the whole network turns {'them' if len(frozen) > 1 else 'it'} on",
        culprit=place.statement_span("switches what was frozen on together with the rest", "culprit"),
        related=wording.spans(
            wording.span(book.made, f"`{name}` was made when they did not require grad", "declared"),
            wording.span(book.step_site, "changes them at every step", "context"),
        ),
        tensors=wording.facts(frozen, incident.names),
        explanation=f"The same statement switches {wording.listed(rest, len(beside))}, which did require grad, off and on between "
        f"the steps. "
        f"It sets one value for all of them, so {shown} required grad from the first time on, and {book.steps} steps have changed "
        f"{'them' if len(frozen) > 1 else 'it'}.",
        fixes=[
            Fix(
                title="Switch only the parameters that are to be trained, not the whole network",
                safety="unsafe",
                detail="Before the first switch: `trained = [p for p in net.parameters() if p.requires_grad]`.",
            )
        ],
        confidence="likely",
    )


def _switched_at(incident: Incident, parameter: torch.Tensor) -> CallSite | None:
    known = incident.journal.toggle_of(parameter)
    return None if known is None else known[1]
