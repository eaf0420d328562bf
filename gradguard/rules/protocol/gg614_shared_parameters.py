"""# GG614 shared-parameters

## What it is
Two optimizers hold the same parameter, and both step on the same gradient.

## Why it is wrong
The parameter is updated twice for one gradient, at two rates and with two sets of running averages that know nothing of each
other.

## Example
    backbone_opt = Adam(model.parameters(), lr=1e-4)      # contains the head as well
    head_opt = Adam(model.head.parameters(), lr=1e-3)

## Use instead
One optimizer with parameter groups, or disjoint lists.

## Fix safety
Unsafe: effective learning rates change.

## When it speaks, what silences it
At the third time both optimizers have stepped on the very same backward's contribution to one parameter. An optimizer that
was abandoned, optimizers that step on gradients of different backward calls (alternating objectives), and one optimizer
inside another's step (Lookahead) are silent.
"""

from __future__ import annotations

from gradguard.analysis.incident import Incident
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.monitors.ledger_verdicts import SharedParameters
from gradguard.rules import wording
from gradguard.rules.base import Rule

CODE, NAME = "GG614", "shared-parameters"


def recognise(incident: Incident) -> Diagnosis | None:
    """Both optimizers, and what they share."""
    finding: SharedParameters = incident.finding
    book, other, later = finding.book, finding.other, finding.later
    if book is None:
        return None
    mine = {id(p) for p in book.parameters()}
    shared = [p for p in other.parameters() if id(p) in mine]
    first, second = wording.optimizer_name(book if later is other else other, incident), wording.optimizer_name(later, incident)
    if first == second:  # a loop's variable: by what holds them
        held = {id(value): path for path, value in reversed(incident.names.bindings) if "[" in path}
        first, second = (held.get(id(each.ref()), first) for each in (book if later is other else other, later))
    names = wording.parameter_names(shared, incident.names)
    one = f"`{first}`" if first != second else "another"
    culprit = wording.span(later.made, f"{one} has {'these' if len(shared) > 1 else 'this'} already", "culprit") or wording.span(
        later.step_site, f"applies what {one} has applied already", "culprit"
    )
    earlier = book if later is other else other
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=(f"`{first}` and `{second}` both" if first != second else "two optimizers")
        + f" update {wording.listed(names, len(shared))}, from the same gradient",
        culprit=culprit,
        related=wording.spans(
            None if earlier.made == later.made else wording.span(earlier.made, f"`{first}` is made here", "declared"),
            wording.span(earlier.step_site, "first step on the gradient", "context"),
            wording.span(later.step_site, "second step on it", "context"),
        ),
        tensors=wording.facts(shared, incident.names),
        explanation="At each step both optimizers applied the same backward's gradient to these parameters: they are updated twice, with "
        "two sets of running averages.",
        fixes=[Fix(title="Give each parameter to one optimizer (parameter groups can have rates of their own)", safety="unsafe")],
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="two optimizers update the same parameter from the same gradient",
    recognise=recognise,
    moments=frozenset({"finding"}),
    severity="warning",
)
