"""# GG722 amp-scaler-misuse

## What it is
The calls on a `GradScaler` come in an order it does not allow: `step` twice before `update`, `step` or `update` without a
scaled backward before it, gradients in float16 where the parameters should be float32. Or the optimizer is stepped past the
scaler, on gradients that are still scaled; or through the scaler, on gradients of a loss that was never scaled.

## Why it is wrong
The scaler notes infinities while it unscales an optimizer's gradients. With no gradient to look at, or with a step that was
taken already, it cannot know whether the step is safe, and refuses.

## Example
    loss.backward()                 # not scaler.scale(loss).backward()
    scaler.step(optimizer)          # AssertionError: ... but _scale is None
    scaler.update()

## Use instead
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

## Fix safety
Manual: which call is missing or one too many is the program's to say.

## When it speaks, what silences it
When PyTorch raises; and at the second step of an optimizer, called directly, on gradients of a scaled loss that no scaler has
unscaled and nobody has read in between; and at the second step through a scaler on gradients of a loss that it has not scaled.
Where the optimizer has no gradients because a path is cut, the rule for the cut path speaks instead; in an untraced step, whose
paths nobody saw, the line is left open.
"""

from __future__ import annotations

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.optimizer_contents import parameters_of
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.monitors.grad_scaler import NeverScaled
from gradguard.monitors.optimizer_books import Book
from gradguard.rules import wording
from gradguard.rules.base import Rule
from gradguard.rules.frameworks import missing_update
from gradguard.rules.frameworks.gg722_amp_scaler_misuse import never_scaled
from gradguard.rules.frameworks.scaler_names import scaler_in_words

CODE, NAME = "GG722", "amp-scaler-misuse"
_HALF = "attempting to unscale fp16 gradients"
_NONE = "no inf checks were recorded for this optimizer"
_AGAIN, _LATE = "step() has already been called since the last update()", "unscale_() is being called after step()"
_CASES = {
    _AGAIN: (
        "is called twice before `{scaler}.update()`",
        "Between two updates an optimizer steps once; the second step would use gradients whose infinities were not looked for again.",
        "Call `{scaler}.update()` once, after all optimizers have stepped",
    ),
    _NONE: (
        "finds no gradient: no parameter of this optimizer got one from a scaled backward",
        (
            "The scaler looks for infinities in the gradients of the optimizer's "
            "parameters, and there are none. The backward did not reach them."
        ),
        "See to it that the loss depends on this optimizer's parameters, and call `{scaler}.scale(loss).backward()` before",
    ),
    "no inf checks were recorded prior to update": (
        "has nothing to go by: no optimizer has stepped through this scaler since the last update",
        "The new scale follows from the infinities seen in the steps since the last update, and there was no step.",
        "Call `{scaler}.step(optimizer)` in place of `optimizer.step()`, then `{scaler}.update()`",
    ),
    "but _scale is none": (
        "has no scale yet: no loss has been scaled",
        "The scale is made when the first loss is scaled.",
        "Call `{scaler}.scale(loss).backward()` before",
    ),
    _HALF: (
        "finds float16 gradients: the parameters themselves are float16",
        (
            "A GradScaler is for float32 parameters under autocast. Parameters "
            "cast to float16 have gradients that lose what scaling would save."
        ),
        "Keep the parameters in float32 (no `.half()`), and run forward under `torch.autocast`",
    ),
}
_UNSEEN = (
    "This step was not traced: where the way to these parameters ends was not seen. `level: strict` (GRADGUARD_LEVEL=strict) traces "
    "every step and names it."
)


def recognise(incident: Incident) -> Diagnosis | None:
    """Which order was broken, at which call."""
    if incident.moment == "finding":
        return _past_the_scaler(incident)
    place = incident.place
    text = incident.message.lower()
    if _AGAIN in text or _LATE in text:
        diagnosis = _not_updated(incident, place)
        if diagnosis is not None or _LATE in text:
            return diagnosis
    found = next((case for piece, case in _CASES.items() if piece in text), None)
    if found is None or place is None:
        return None
    scaler = (place.callee or "scaler.step").rpartition(".")[0] or "scaler"
    what, why, fix = (part.format(scaler=scaler) for part in found)
    if _HALF in text and (half := _cast_by_hand(incident, place, scaler, why)) is not None:
        return half
    known = _NONE not in text or incident.traced
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"`{place.callee or 'the scaler'}` {what}",
        culprit=place.span("the scaler refuses here", "culprit") if known else None,
        related=[] if known else [place.span("the scaler refuses here", "backward")],
        explanation=why,
        fixes=[Fix(title=fix, safety="manual")],
        notes=[] if known else [_UNSEEN],
    )


def _cast_by_hand(incident: Incident, place: ResolvedSite, scaler: str, why: str) -> Diagnosis | None:
    """The line that made the parameters of the optimizer float16, where it was seen."""
    held = [p for optimizer in incident.names.optimizers() for p in parameters_of(optimizer) if p.dtype == torch.float16]
    made = resolve(wording.cast(incident, held)) if held else None
    if made is None:
        return None
    roots = wording.roots_of(held, incident.names)
    whose = f"the parameters of `{roots[0]}`" if roots else "the parameters"
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"`{place.callee or 'the scaler'}` finds float16 gradients: {whose} were cast to float16 by "
        f"`{wording.short(made.text, 40)}`",
        culprit=made.span("from here on the parameters, and so their gradients, are float16", "culprit"),
        related=[place.span(f"`{scaler}` (a GradScaler) refuses here", "backward")],
        tensors=wording.facts(held, incident.names),
        explanation=why,
        fixes=[
            Fix(
                title=f"Leave out `{wording.short(made.text, 40)}`, and run forward under `torch.autocast(..., dtype=torch.float16)`",
                safety="unsafe",
                detail="Or train in bfloat16 without a scaler: its range is that of float32.",
            )
        ],
    )


def _not_updated(incident: Incident, place: ResolvedSite | None) -> Diagnosis | None:
    """New gradients have come since the optimizer's last step, and no update() in between."""
    step = None if place is None else missing_update.step_before(incident, place)
    if place is None or step is None:
        return None
    scaler = (place.callee or "scaler.step").rpartition(".")[0] or "scaler"
    found = missing_update.spans(incident, step, scaler)
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"`{scaler}.update()` was not called between the last step and this `{place.callee or 'call'}`",
        culprit=found[0] if found else None,
        related=[*found[1:], place.span("the scaler refuses here: it takes the last step for this one", "backward")],
        explanation=f"`{scaler}` keeps what it knows of an optimizer's gradients (unscaled, stepped, infinities found) until `update()`. "
        "A new backward has run since, whose gradients it takes for those of the step before.",
        fixes=[
            Fix(
                title=f"Call `{scaler}.update()` once after each step, on every way through the loop",
                safety="manual",
                detail="Where several optimizers step in one turn: once, after the last of them.",
            )
        ],
    )


def _past_the_scaler(incident: Incident) -> Diagnosis | None:
    """An optimizer that is stepped directly, on gradients of a scaled loss."""
    finding = incident.finding
    book: Book = finding.book
    if isinstance(finding, NeverScaled):
        return never_scaled.diagnosis(incident, finding, book)
    name, scale = wording.optimizer_name(book, incident), finding.scale
    scaler, bare = scaler_in_words(incident)
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{name}.step()` applies gradients that are still {scale:g} times too large: it goes past {scaler}",
        culprit=wording.span(book.step_site, f"steps without {scaler}, on scaled gradients", "culprit"),
        related=wording.spans(wording.span(finding.scaled, f"scales the loss by {scale:g}", "backward")),
        tensors=wording.facts(book.parameters(), incident.names),
        explanation=f"The loss was scaled by {scale:g} before backward(), and so were all gradients. A GradScaler divides them by the "
        "scale again in its step() or unscale_(), and neither was called for this optimizer.",
        fixes=[
            Fix(
                title=f"Call `{bare}.step({name})` in place of `{name}.step()`, and `{bare}.update()` after it",
                safety="unsafe",
                detail="step() unscales, and leaves the step out where gradients overflowed.",
            )
        ],
        confidence="certain",
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="the calls on a GradScaler come in an order it does not allow",
    recognise=recognise,
    moments=frozenset({"error", "finding"}),
    messages=(*_CASES, _LATE),
    priority=-5,
)
