"""# GG752 accelerate-backward-bypassed

## What it is
`loss.backward()` is called in a program that accelerate drives, in place of `accelerator.backward(loss)`; or an optimizer that
`accelerator.prepare()` was not given steps in the middle of an accumulation.

## Why it is wrong
`accelerator.backward` divides the loss by the number of accumulation steps and scales it for mixed precision. Called directly,
accumulated gradients are as many times too large as there are micro-batches, and float16 gradients are not scaled at all.

## Example
    with accelerator.accumulate(model):
        loss = model(batch).loss
        loss.backward()

## Use instead
    with accelerator.accumulate(model):
        loss = model(batch).loss
        accelerator.backward(loss)

## Fix safety
Unsafe: gradients shrink by the number of accumulation steps, which is the purpose.

## When it speaks, what silences it
At the second direct backward call at one line while gradient accumulation over more than one step, or a gradient scaler, is
configured, if something that the loss trains was prepared. Without either the two calls do the same, and it is silent. And at
the second step of an optimizer while accelerate says that gradients are still being accumulated, if the last backward was
accelerate's.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import resolve
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.rules.accelerated import accelerator_name, trains_prepared
from gradguard.rules.base import Rule
from gradguard.rules.frameworks.gg752_accelerate_backward_bypassed import unprepared

CODE, NAME = "GG752", "accelerate-backward-bypassed"


@dataclass
class _Seen:
    """The direct calls, by line, and whether anything was told of them."""

    calls: Counter[Any] = field(default_factory=Counter)
    done: bool = False


def recognise(incident: Incident) -> Diagnosis | None:
    """A backward call with no accelerate in its stack, under an accelerate that would have changed the loss."""
    state = sys.modules.get("accelerate.state")
    if state is not None and incident.moment == "before_step":
        return unprepared.recognise(incident, CODE, NAME, _accumulation(state))
    if state is None or incident.where != "backward" or incident.call is None or incident.call.nested:
        return None
    seen = incident.notes[_Seen]
    if seen.done:
        return None
    steps = _accumulation(state)
    if steps <= 1:
        return None
    if any("accelerate" in view.frame.f_code.co_filename and view.code_name == "backward" for view in incident.frames):
        return None
    site = incident.call.site
    seen.calls[site] += 1
    place = resolve(site)
    if seen.calls[site] < 2 or place is None:
        return None
    seen.done = True
    if not trains_prepared(incident):
        return None
    root = (place.receiver or "loss") if place.receiver else "loss"
    accelerator = accelerator_name(incident) or "accelerator"
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{root}.backward()` goes past `{accelerator}.backward`: "
        f"over {steps} accumulation steps the gradients become {steps} times too large",
        culprit=place.span(f"`{accelerator}.backward({root})` would divide by {steps}", "culprit"),
        explanation=f"`{accelerator}.backward` divides the loss by `gradient_accumulation_steps` ({steps}) "
        "and scales it for mixed precision. "
        "The direct call does neither, so that the sum of the micro-batches' gradients is stepped with, not their mean.",
        fixes=[Fix(title=f"Call `{accelerator}.backward({root})`", safety="unsafe")],
        avoid=[f"dividing the loss by {steps} by hand as well: `{accelerator}.backward` does it"],
    )


def _accumulation(state: Any) -> int:
    shared = getattr(getattr(state, "GradientState", None), "_shared_state", None) or {}
    plugin = shared.get("plugin_kwargs") or {}
    return int(plugin.get("num_steps") or 1)


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="loss.backward() in place of accelerator.backward(loss)",
    recognise=recognise,
    moments=frozenset({"before_backward", "before_step"}),
    screen=lambda notes, moment, facts, traced: (
        "accelerate.state" in sys.modules and (moment != "before_step" or unprepared.screen(notes, facts.get("optimizer")))
    ),
    idle=lambda notes: (state := sys.modules.get("accelerate.state")) is None or _accumulation(state) <= 1,
    severity="warning",
)
