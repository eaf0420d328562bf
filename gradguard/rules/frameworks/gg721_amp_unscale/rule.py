"""# GG721 amp-unscale

## What it is
Gradients that a `GradScaler` has scaled are unscaled twice between two updates, or clipped before they are unscaled.

## Why it is wrong
`unscale_` divides the gradients by the scale; a second time they would be divided again, so PyTorch refuses. It takes new
gradients for the old ones where a batch was left out between `unscale_` and `update()`. Clipping before
`unscale_` compares gradients that are thousands of times too large with the limit: every step is clipped to almost nothing.

## Example
    scaler.scale(loss).backward()
    clip_grad_norm_(model.parameters(), 1.0)   # these are still scaled
    scaler.step(optimizer)

## Use instead
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)                 # once, after the last micro-batch
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()

## Fix safety
Unsafe: the size of the updates changes, which is the purpose.

## When it speaks, what silences it
When PyTorch raises; and, without an exception, at a clipping between `scale(loss).backward()` and `unscale_` of the optimizer
that holds the parameters, the second time it happens at one line. A scale of 1 and a limit that is no number are silent.
"""

from __future__ import annotations

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.monitors.grad_scaler import ClippedScaled
from gradguard.rules import wording
from gradguard.rules.base import Rule
from gradguard.rules.frameworks import missing_update
from gradguard.rules.frameworks.gg721_amp_unscale import moved, skipped_update

CODE, NAME = "GG721", "amp-unscale"
_TWICE = "unscale_() has already been called on this optimizer since the last update()"
_LATE = "unscale_() is being called after step()"


def recognise(incident: Incident) -> Diagnosis | None:
    """A refused `unscale_`, or a clipping of scaled gradients."""
    return _clipped(incident) if incident.error is None else _refused(incident)


def _refused(incident: Incident) -> Diagnosis | None:
    place = incident.place
    if place is None:
        return None
    late = _LATE in incident.message
    if late and missing_update.step_before(incident, place) is not None:
        return None  # GG722: these are new gradients, and it is the update after the step before them that is missing
    receiver = (place.callee or "scaler.unscale_").rpartition(".")[0] or "scaler"
    skipped = None if late else skipped_update.diagnosis(CODE, NAME, place, receiver)
    if skipped is not None:
        return skipped
    what = (
        f"`{receiver}.unscale_` comes after `{receiver}.step()`"
        if late
        else (f"`{receiver}.unscale_` is called a second time before `{receiver}.update()`")
    )
    guarded = ""
    if not late and skipped_update.guarded(place, receiver):
        guarded = " It stands outside of the condition that guards the step: with accumulation it runs for every micro-batch."
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"{what}: the gradients would be unscaled twice" if not late else f"{what}: the step has used them already",
        culprit=place.span("unscales gradients that are unscaled already" if not late else "comes too late", "culprit"),
        explanation=(
            "The scaler divides all gradients of an optimizer by its scale once between two `update()` calls, either here or in `step()`."
        )
        + guarded,
        fixes=[_once(place, receiver, late)],
        avoid=[] if late else [f"calling `{receiver}.update()` in between: the micro-batches of one update would be scaled differently"],
    )


def _once(place: ResolvedSite, receiver: str, late: bool) -> Fix:
    given = place.arguments[0] if place.call is not None and len(place.arguments) == 1 and not place.keywords else "optimizer"
    unscale, step = f"`{receiver}.unscale_({given})`", f"`{receiver}.step({given})`"
    move = None if late else moved.to_the_step(place, receiver)
    if move is None:
        title = f"Call {unscale} once an update: after the last micro-batch's backward, right before clipping and {step}"
        return Fix(title=title, safety="unsafe")
    what = f"{unscale} and the clipping after it" if move.clipping else unscale
    into = "" if move.test is None or place.source is None else f" into `if {wording.short(place.source.flat(move.test), 40)}:`,"
    return Fix(title=f"Move {what}{into} right before {step}: once an update", safety="unsafe", patch=move.patch)


def _clipped(incident: Incident) -> Diagnosis | None:
    finding: ClippedScaled = incident.finding
    place, scaled = resolve(finding.site), resolve(finding.scaled)
    if place is None:
        return None
    theirs, scaler = (scaled.callee or "").rpartition(".")[0] if scaled is not None else "", finding.scaler
    here = wording.name_here(incident, None if scaler is None else scaler())
    optimizer = None if finding.book is None else wording.name_here(incident, finding.book.ref())
    shown = f"`{here or theirs}`" if here or theirs else "the scaler"
    unscale = f"`{here}.unscale_({optimizer or 'optimizer'})`" if here else f"`unscale_` of {shown}, with the optimizer,"
    call = (place.callee or "clip_grad_norm_").rpartition(".")[2]
    scale = finding.scale
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{call}` clips gradients that {shown} has scaled by {scale:g} and not unscaled yet",
        culprit=place.span("clips scaled gradients", "culprit"),
        related=[scaled.span("scales the loss, and with it every gradient", "backward")] if scaled is not None else [],
        explanation=f"At this call the gradients are {scale:g} times too large. Compared with them the limit is {scale:g} times too small, "
        "so that nearly every step is clipped to almost nothing.",
        fixes=[Fix(title=f"Call {unscale} before `{call}`", safety="unsafe", patch=moved.before_clipping(place, scaled, here, optimizer))],
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="gradients of a GradScaler are unscaled twice, or clipped before they are unscaled",
    recognise=recognise,
    moments=frozenset({"error", "finding"}),
    messages=(_TWICE.lower(), _LATE.lower()),
)
