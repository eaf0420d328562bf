"""# GG602 zeroed-before-step

## What it is
Gradients that a backward call has just made are cleared before any optimizer step has used them, time and again.

## Why it is wrong
That backward call does nothing: what only its loss trains is never trained. It happens when a second `zero_grad()` stands
between two backward calls of one step, or when `zero_grad()` runs for every micro-batch of an accumulation.

## Example
    optimizer.zero_grad()
    seg_loss.backward(retain_graph=True)
    optimizer.zero_grad()        # clears what seg_loss has just made
    depth_loss.backward()
    optimizer.step()

## Use instead
Clear once a step, before the first backward; or add the losses and call backward once.

## Fix safety
Unsafe: both losses train afterwards, which changes the results; that is the purpose.

## When it speaks, what silences it
After three backward calls at one line whose every contribution was cleared unused, two of them in traced steps in which the
user's code read no `.grad` in between. It is silent where any parameter was written in between (a hand-written update, SAM),
where any of the contributions was used (a GAN's discriminator is filled by the generator's backward as well), and where the
gradients are read (adversarial examples, Fisher information, gradient surgery), and under a GradScaler, which skips steps. What is left
of an accumulation is told the second time that as many calls as before, fewer than a step waits for, were cleared after as many whole ones.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from gradguard.analysis.history.loss_expressions import root_expression
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.at_places import brought_after, taken_out
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.ledger_verdicts import RestCleared, ZeroedBeforeStep
from gradguard.monitors.optimizer_books import Book
from gradguard.monitors.tensor_state import version_of
from gradguard.rules import accelerated, wording
from gradguard.rules.base import Rule
from gradguard.rules.protocol.gg602_zeroed_before_step import mixed_up

CODE, NAME = "GG602", "zeroed-before-step"


class Options(BaseModel):
    """What can be set under `rules: {GG602: ...}`."""

    model_config = ConfigDict(extra="forbid")

    times: int = Field(default=3, ge=2, le=100, description="how often all that a backward call added was cleared unused before it speaks")


def recognise(incident: Incident) -> Diagnosis | None:
    """The zero_grad() that clears too early, the backward whose work is lost, and what only that backward trains."""
    finding: ZeroedBeforeStep | RestCleared = incident.finding
    book, part = finding.book, finding.part
    if any("Scaler" in type(value).__name__ for _, value in incident.names.bindings):
        return None
    zero, backward = resolve(finding.zero), resolve(part.call.site)
    if isinstance(finding, RestCleared):
        return _rest(incident, finding, zero, backward)
    if book is not None and book.empty >= 2 and _stands_first(book, finding):
        return _step_first(incident, book, finding)
    mixed = None if book is None else mixed_up.told(incident, finding, CODE, NAME, book, backward)
    if mixed is not None:
        return mixed
    owner = finding.owner() if finding.owner is not None else None
    wrapper = None if book is None else accelerated.wrapper_of(incident, book.ref())
    who = incident.names.optimizer_variable(owner) or (zero.receiver if zero is not None else None) or type(owner).__name__
    loss = _loss(backward)
    later = [b.last_part for b in incident.notes[Ledger].books.values() if b.last_part is not None and b.last_part is not part]
    other = next((resolve(p.call.site) for p in later if p.call.site != part.call.site), None)
    parameters = [] if book is None else book.parameters()
    only = [p for p in parameters if p.requires_grad and not (book is not None and _moved(book, p))]
    names = wording.parameter_names(only, incident.names)
    untrained = (
        f" {wording.listed(names, len(only))} {'get' if len(only) > 1 else 'gets'} gradient from nothing else and never changed."
        if only and len(only) < len(parameters)
        else ""
    )
    used = book is not None and book.last_used is not None and book.last_used.call.site == part.call.site
    roots = sorted({".".join(name.split(".")[:-1]) for name in names})
    learns = f": {' and '.join(f'`{root}`' for root in roots[:2])} never learns" if untrained and roots else ""
    counts = ": only the last backward of each accumulation counts" if used else ""
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{who}.zero_grad()` clears the gradients of `{loss}` before any step has used them{learns or counts}"
        if zero is not None
        else f"the gradients of `{loss}` are cleared before any step has used them{learns or counts}",
        culprit=None
        if zero is None
        else zero.span(f"clears what `{wording.short(backward.text if backward else 'backward()', 32)}` has just computed", "culprit"),
        related=wording.spans(
            None
            if backward is None
            else backward.span(
                "only its last gradients before a step are used" if used else "all the gradients of this backward are lost", "backward"
            ),
            None if other is None else other.span("only this backward's gradients reach the step", "backward"),
            *[wording.span(each, "clears a part of them", "context") for each in finding.zeros],
        ),
        tensors=wording.facts(only if untrained else parameters, incident.names),
        explanation=(
            f"{finding.count} times all that this backward added to `.grad` was cleared before any optimizer had stepped on it: "
            f"{'of what is to be accumulated only the last part counts.' if used else 'this backward trains nothing.'}{untrained}"
        ),
        fixes=[
            accelerated.clears_behind_the_step(wrapper, zero, None if book is None else resolve(book.step_site))
            if used and wrapper is not None
            else Fix(
                title=f"Move `{who}.zero_grad()` behind the optimizer's step, where it clears once an accumulation",
                safety="unsafe",
                patch=None if book is None else brought_after(zero, resolve(book.step_site)),
            )
            if used
            else Fix(title=f"Keep the gradients of `{loss}` until the optimizer that they are for has stepped", safety="manual")
            if zero is None
            else Fix(
                title=f"Remove this `{who}.zero_grad()`: clear once a step, before its first backward",
                safety="unsafe",
                detail="Or add the losses and call backward once: `(loss_a + loss_b).backward()`.",
                patch=taken_out(zero),
            )
        ],
        confidence="certain",
    )


def _rest(incident: Incident, finding: RestCleared, zero: ResolvedSite | None, backward: ResolvedSite | None) -> Diagnosis:
    """The end of an epoch that is no whole accumulation."""
    owner = finding.owner() if finding.owner is not None else None
    who = incident.names.optimizer_variable(owner) or (zero.receiver if zero is not None else None) or type(owner).__name__
    book, left, whole = finding.book, finding.left, finding.whole
    assert book is not None
    name = wording.optimizer_name(book, incident)
    calls = "the last backward call" if left == 1 else f"the last {left} backward calls"
    have = "has" if left == 1 else "have"
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{who}.zero_grad()` clears what {calls} {have} added: `{name}` steps after {whole} of them, and {left} are left over"
        if left > 1
        else f"`{who}.zero_grad()` clears what {calls} has added: `{name}` steps after {whole} of them, and one is left over",
        culprit=None if zero is None else zero.span("clears the rest, which no step has used", "culprit"),
        related=wording.spans(
            None if backward is None else backward.span("adds up gradients", "backward"),
            wording.span(book.step_site, f"steps after {whole} backward calls", "context"),
        ),
        tensors=wording.facts(book.parameters(), incident.names),
        explanation=f"This happens again and again, each time after as many whole accumulations of {whole} backward calls. No step "
        "trains on the samples of the rest.",
        fixes=[
            Fix(
                title=f"Step once more where the batches end and fewer than {whole} are left: `{name}.step()` before this `zero_grad()`",
                safety="manual",
                detail="Where the loss is divided by the number of batches that are added up, the rest has fewer of them.",
            ),
            Fix(title=f"Take a number of batches that {whole} divides (`drop_last`), if the rest is not to count"),
        ],
        confidence="likely",
    )


def _loss(backward: ResolvedSite | None) -> str:
    """`loss` of `loss.backward()`, and of `accelerator.backward(loss)`."""
    root = None if backward is None else root_expression(backward)
    return (backward.source.flat(root) if backward is not None and backward.source is not None and root is not None else None) or "the loss"


def _stands_first(book: Book, finding: ZeroedBeforeStep) -> bool:
    """Whether the step stands between the zero_grad() and the backward: in that order within one function."""
    zero, step, backward = resolve(finding.zero), resolve(book.step_site), resolve(finding.part.call.site)
    if zero is None or step is None or backward is None:
        return False
    same = zero.enclosing_function is step.enclosing_function is backward.enclosing_function and zero.file == step.file == backward.file
    return same and step.line < backward.line


def _step_first(incident: Incident, book: Book, finding: ZeroedBeforeStep) -> Diagnosis | None:
    """The optimizer steps between the zero_grad() and the backward, and finds no gradient each time."""
    name = wording.optimizer_name(book, incident)
    step, backward = resolve(book.step_site), resolve(finding.part.call.site)
    if step is None:
        return None
    call = wording.short(backward.text if backward is not None else "backward()", 32)
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{name}.step()` runs before `{call}`, and its gradients are cleared before the next step: nothing is trained",
        culprit=step.span("no parameter has a gradient here", "culprit"),
        related=wording.spans(
            None if backward is None else backward.span("makes the gradients, after the step", "backward"),
            wording.span(finding.zero, "clears them before the next step", "context"),
        ),
        tensors=wording.facts(book.parameters(), incident.names),
        explanation=f"In {book.empty} steps in a row `{name}` found no gradient at all; the backward that makes them comes behind it.",
        fixes=[Fix(title=f"Move `{name}.step()` below `{call}`", safety="unsafe", patch=brought_after(step, backward))],
        confidence="certain",
    )


def _moved(book: object, parameter: object) -> bool:
    return any(ref() is parameter and version_of(parameter) != version for ref, version in getattr(book, "first_versions", ()))


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="gradients are cleared after backward and before any step has used them",
    recognise=recognise,
    moments=frozenset({"finding"}),
    severity="warning",
)
