"""# GG610 grad-overwritten

## What it is
Gradients are clipped after the optimizer's step has used them, or before backward has made any; or no parameter is given to the
clipping, since the iterator that was to give them has been gone through.

## Why it is wrong
The clipping has no effect on the update: the step applies the raw gradient.

## Example
    loss.backward()
    optimizer.step()
    clip_grad_norm_(model.parameters(), 1.0)   # too late

## Use instead
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

## Fix safety
Unsafe: updates are clipped from now on, which is the purpose.

## When it speaks, what silences it
At the third call at one line for which every followed gradient has been used by a step and no backward has added to it since.
Also at the third call in a row at which no parameter has a gradient, while every step in between found some. And at the third that
gets an iterator in which nothing is left, where it is the same one each time.
A limit so high that it never clips (a way to log the norm) is silent, and so is a call that at times comes in time.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import resolve
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.at_places import brought_before
from gradguard.monitors.ledger_verdicts import LateClipping, NothingToClip, ParametersExhausted
from gradguard.rules import wording
from gradguard.rules.base import Rule
from gradguard.rules.protocol.gg610_grad_overwritten import exhausted

CODE, NAME = "GG610", "grad-overwritten"


class Options(BaseModel):
    """What can be set under `rules: {GG610: ...}`."""

    model_config = ConfigDict(extra="forbid")

    times: int = Field(default=3, ge=2, le=100, description="how often gradients were clipped when none was new before it speaks")


def recognise(incident: Incident) -> Diagnosis | None:
    """The late call and the step before it."""
    finding: LateClipping = incident.finding
    book, site = finding.book, finding.site
    place = resolve(site)
    if book is None or site is None or place is None:
        return None
    if isinstance(finding, ParametersExhausted):
        return exhausted.told(incident, book, site, CODE, NAME)
    name = wording.optimizer_name(book, incident)
    call = (place.callee or "clip_grad_norm_").split(".")[-1]
    if not isinstance(finding, NothingToClip):
        headline = f"`{call}` clips gradients that `{name}.step()` has already applied: the clipping has no effect"
        label = "comes after the step that used these gradients"
        explanation = (
            "At this call every gradient has been used by the step before, and no backward has added to it since. What is "
            "clipped here is cleared before it could matter."
        )
    else:
        headline = f"`{call}` runs before backward(), when no parameter has a gradient: the clipping has no effect"
        label = "no parameter has a gradient here"
        explanation = (
            f"In {finding.calls} calls none of the parameters had a gradient, and the steps in between all found some, which were made "
            "after the clipping."
        )
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=headline,
        culprit=place.span(label, "culprit"),
        related=wording.spans(
            None if book.last_part is None else wording.span(book.last_part.call.site, "makes the gradients", "backward"),
            wording.span(book.step_site, "applies them unclipped", "context"),
        ),
        explanation=explanation,
        fixes=[
            Fix(
                title=f"Move `{call}` between backward() and `{name}.step()`",
                safety="unsafe",
                detail="With a GradScaler: after `scaler.unscale_(optimizer)`.",
                patch=brought_before(place, resolve(book.step_site)),
            )
        ],
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="gradients are clipped after the step that used them, or before backward has made any",
    recognise=recognise,
    moments=frozenset({"finding"}),
    severity="warning",
)
