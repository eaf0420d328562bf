"""# GG601 stale-gradients

## What it is
An optimizer steps on gradients that an earlier step has already used, together with new ones: nothing cleared them between.

## Why it is wrong
`backward()` adds to `.grad`; it does not replace what is there. Without `zero_grad()` each step applies the sum of the
gradients of all steps so far. The loss may still fall for a while; then it oscillates or diverges.

## Example
    for x, y in loader:
        loss = loss_fn(model(x), y)
        loss.backward()       # adds to the gradients of all batches before
        optimizer.step()

## Use instead
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()

Where several optimizers share a loop, each clears its own parameters (or `model.zero_grad()` clears all).

## Fix safety
Unsafe: it changes the training, which is what it is for. A learning rate tuned with the bug in place may need to be raised.

## When it speaks, what silences it
At the second step of an optimizer that applies an old contribution together with a new one; and at the third that applies what
another network's loss has left, on its way through this one to what its own optimizer trains. Gradient accumulation does not
trip it (no step has used the parts that pile up there), nor clearing by hand: `p.grad = None`, `p.grad.zero_()`, also through
`.data`, nor gradients left over from another network's backward that are cleared before their own optimizer's step.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import resolve
from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.at_places import put_after, put_before
from gradguard.monitors.cross_network import LeftByAnother
from gradguard.monitors.findings import Finding
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.optimizer_books import Book
from gradguard.rules import wording
from gradguard.rules.base import Rule
from gradguard.rules.spans import not_called

CODE, NAME = "GG601", "stale-gradients"


class Options(BaseModel):
    """What can be set under `rules: {GG601: ...}`."""

    model_config = ConfigDict(extra="forbid")

    after: int = Field(
        default=2, ge=2, le=100, description="steps on gradients of earlier steps before it speaks (looked at at 2, 24, 100)"
    )


def recognise(incident: Incident) -> Diagnosis | None:
    """The step, the backward that piled up, and whose gradients were not cleared."""
    finding: Finding = incident.finding
    book = finding.book
    if book is not None and isinstance(finding, LeftByAnother):
        return _across(incident, book, finding)
    if book is None or book.last_part is None or book.stale < incident.options(RULE).after:
        return None
    name = wording.optimizer_name(book, incident)
    parameters = [p for p in book.parameters() if p.grad is not None]
    names = wording.parameter_names(parameters, incident.names)
    roots = wording.roots_of(parameters, incident.names)
    step = resolve(book.step_site)
    backward = resolve(book.last_part.call.site)
    whose = f"the gradients of `{roots[0]}`" if len(roots) == 1 else "its gradients"
    cleared = incident.notes[Ledger].last_zero
    never = book.zeros == 0
    at = resolve(book.zero_site)
    theirs = not never and not book.zeroed_at_step and (at is None or "zero_grad" not in (at.callee or ""))  # a trainer's, before the loop
    if book.habit.left_at and book.habit.left_at == book.followed_from:
        history = f"nothing has cleared them since step {book.habit.left_at - 1} of {book.steps}"
    elif never and cleared is not None:
        history = f"`zero_grad()` is called in this run, but never for the parameters of `{name}`"
    elif never or theirs:
        history = "`zero_grad()` is never called" + (" in the loop" if theirs else "")
    elif book.zeroed_at_step < book.followed_from:
        history = f"nothing has cleared them in the last {book.steps - book.followed_from} of {book.steps} steps"
    else:
        history = f"`zero_grad()` was last called before step {book.zeroed_at_step + 1} of {book.steps}"
    label = f"applies what step {book.steps - 1} has already applied once more"
    step_span = None if step is None else step.span(label, "culprit")
    idle = _idle(incident, book)
    if idle is not None and never:
        culprit = wording.span(idle, f"clears nothing: these gradients are clear already, and those of `{name}` never are", "culprit")
        related = wording.spans(
            None if backward is None else backward.span("adds to the gradients of all steps before", "backward"),
            None if step is None else step.span(label, "context"),
        )
    else:
        culprit = step_span
        unseen = book.zeroed_at_step < book.followed_from
        last = "has cleared the gradients until then" if unseen else f"clears the gradients, last before step {book.zeroed_at_step + 1}"
        zero = None if never or theirs else wording.span(book.zero_site, last, "context")
        related = wording.spans(zero, None if backward is None else backward.span("adds to the gradients of all steps before", "backward"))
    bare = not_called(incident.sources, "zero_grad") if never and cleared is None else None
    if bare is not None:
        related = wording.spans(*related, culprit.model_copy(update={"role": "context"}) if culprit is not None else None)
        culprit = bare[0]
        history = "`zero_grad` is named and never called"
    several = book.filled >= 1.5 * book.steps  # backward calls a step: gradients are accumulated on purpose
    patched = not several and name.replace(".", "").isidentifier()
    patch = put_before(backward, f"{name}.zero_grad()") if patched else None
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{name}` steps on gradients of earlier steps: {whose} are not cleared between steps ({history})",
        culprit=culprit,
        related=related,
        tensors=wording.facts(parameters, incident.names),
        explanation=(
            f"`backward()` adds to `.grad`. Step {book.steps} applied the new gradients plus those that step {book.steps - 1} had "
            "applied before, "
            f"for {wording.listed(names, len(parameters))}; the sum grows with every step."
        ),
        fixes=[
            Fix(title=f"Write the parentheses: `{wording.short(bare[0].text, 40)}()`", safety="unsafe", patch=bare[1])
            if bare is not None
            else Fix(
                title=f"Call `{name}.zero_grad()` right after `{name}.step()`, where it clears once an accumulation",
                safety="unsafe",
                patch=put_after(step, f"{name}.zero_grad()"),
            )
            if several
            else Fix(
                title=f"Call `{name}.zero_grad()` once a step, before `{wording.short(backward.text if backward else 'backward()', 40)}`",
                safety="unsafe",
                detail="Before the first backward of each step, inside the loop." if not never else None,
                patch=patch,
            )
        ],
        avoid=["lowering the learning rate or clipping: it hides the growth, the direction stays that of old batches"],
        confidence="certain",
    )


def _across(incident: Incident, book: Book, finding: LeftByAnother) -> Diagnosis | None:
    """What another network's loss has left in this one."""
    other, first = finding.other(), finding.own[0].call.site
    name = wording.optimizer_name(book, incident)
    theirs = incident.names.optimizer(other) if other is not None else None
    parameters = [p for p in book.parameters() if p.requires_grad]
    roots = wording.roots_of(parameters, incident.names)
    whose = f"`{roots[0]}`" if len(roots) == 1 else f"the parameters of `{name}`"
    backward, own = resolve(finding.part.call.site), resolve(first)
    if backward is None:
        return None
    loss = wording.short(backward.text or "backward()", 40)
    zero = None if not book.zeros else wording.span(book.zero_site, "clears them too early: before that backward", "context")
    once = [part.call.site for part in finding.own].count(first) == 1  # not in a loop that accumulates
    own_call = wording.short(own.text, 40) if own is not None and own.text else "its own backward"
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{name}` steps on what `{loss}` has left in the gradients of {whose}, together with its own",
        culprit=backward.span(f"fills the gradients of {whose} too, and nothing clears them before its own backward", "culprit"),
        related=wording.spans(
            None if own is None else own.span("adds to them", "backward"),
            wording.span(book.step_site, f"`{name}` applies the sum", "context"),
            zero,
        ),
        tensors=wording.facts(parameters, incident.names),
        explanation=(
            f"`{loss}` goes through {whose} on its way to what {f'`{theirs}`' if theirs else 'another optimizer'} trains, and leaves "
            f"gradients there on the way. In the next step of `{name}` they are added to those of its own loss: {whose} is trained for "
            "the other network's goal as well."
        ),
        fixes=[
            Fix(
                title=f"Call `{name}.zero_grad()` right before `{own_call}`",
                safety="unsafe",
                detail="Where it stands now it runs before the other network's backward." if zero is not None else None,
                patch=put_before(own, f"{name}.zero_grad()") if once and name.replace(".", "").isidentifier() else None,
            )
        ],
        confidence="likely",
    )


def _idle(incident: Incident, book: Book) -> CallSite | None:
    ledger: Ledger = incident.notes[Ledger]
    for other in ledger.books.values():
        if other is not book and other.idle_zero is not None:
            return other.idle_zero
    return None


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="a step applies gradients that an earlier step has applied already: zero_grad() is missing",
    recognise=recognise,
    moments=frozenset({"finding"}),
    severity="warning",
)
