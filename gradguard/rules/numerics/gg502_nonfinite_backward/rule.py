"""# GG502 nonfinite-backward

## What it is
The loss is finite, and backward gives gradients that are NaN or infinite.

## Why it is wrong
Somewhere an op's derivative is infinite where its value is fine: the square root at 0, acos at ±1, a power below 1 at 0, the
branch of `torch.where` that is not taken, singular vectors of equal singular values. Infinity times a gradient of 0 is NaN, and
the optimizer writes it into the weights.

## Example
```python
y = torch.where(x > 0, x.sqrt(), torch.zeros_like(x))  # the gradient at x = 0 is NaN
```

## Use instead
```python
ok = x > 0
y = torch.where(ok, torch.where(ok, x, 1.0).sqrt(), torch.zeros_like(x))
```

## Fix safety
Manual: the value at the singular point is a choice.

## When it speaks, what silences it
Right before an optimizer would apply such a gradient, so the weights are not lost where the policy raises. Where an op of the graph
can make a non-finite gradient of finite values, a small parameter's gradient is looked at after every backward, and where none
can, after one in eight; every parameter's in the first steps, and a changing share of them in traced steps and as often as that
costs next to nothing. Loops that look at the gradients themselves and skip the step, and `GradScaler`, never step with such a
gradient and hear nothing. It speaks once until training has recovered, and not again where the weights themselves have become
NaN. `# gradguard: ignore[GG502]` on the op's line silences it.
With `rules: {GG502: {skip_step: true}}` the optimizer's step on such gradients is left out, in every step and for any optimizer: it
finds its parameters without gradient, and they have it again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import short_list
from gradguard.core.diagnosis import Diagnosis
from gradguard.core.moments import Moment
from gradguard.core.notes import Notes
from gradguard.monitors.numerics import AHEAD, Numbers
from gradguard.rules.base import Rule, SkipStep
from gradguard.rules.numerics.expected_overflow import scaler_in_use
from gradguard.rules.numerics.gg502_nonfinite_backward.backward_diagnosis import blame, finite


class Options(BaseModel):
    """What can be set under `rules: {GG502: ...}`."""

    model_config = ConfigDict(extra="forbid")

    skip_step: bool = Field(
        default=False, description="leave out the optimizer's step on such gradients, as GradScaler does; every step's are looked at then"
    )


def screen(notes: Notes, moment: Moment, facts: dict[str, Any], traced: bool) -> bool:
    state = notes[Numbers]
    if moment == "before_backward":
        state.before_backward(facts, traced)
        return False
    if moment == "after_backward":
        if state.after_backward(facts, traced):
            return state.told is None
        state.release()
        return False
    return state.pending is not None or (notes.options(RULE).skip_step and _spoilt(facts["optimizer"]))


def _bad(optimizer: Any) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None and not finite(p.grad))


def _spoilt(optimizer: Any) -> bool:
    return next(_bad(optimizer), None) is not None


def idle(notes: Notes) -> bool:
    """No gradient found non-finite waits for its optimizer's step."""
    return notes[Numbers].pending is None and not notes.options(RULE).skip_step


def recognise(incident: Incident) -> Diagnosis | None:
    numbers = incident.notes[Numbers]
    if incident.moment == "after_backward":
        try:
            numbers.pending = None if scaler_in_use(incident, numbers) else blame(incident, numbers)
        finally:
            numbers.release()
        return None
    skip: bool = incident.options(RULE).skip_step
    if (numbers.pending is None and not skip) or not _spoilt(incident.optimizer):
        return None
    if skip:
        incident.notes.put(SkipStep())
    if numbers.told is not None:
        return None
    found = numbers.pending or _unseen(incident)
    if skip:
        found = found.model_copy(update={"notes": [*found.notes, "the optimizer's step was left out (`skip_step`)"]})
    numbers.pending, numbers.told = None, found
    return found


def _unseen(incident: Incident) -> Diagnosis:
    """A gradient that was fine, or not looked at, when its backward had run: nothing is left to say where it broke."""
    names = [incident.names.tensor(p) or "a parameter" for p in _bad(incident.optimizer)]
    return Diagnosis(
        code="GG502",
        name="nonfinite-backward",
        severity="warning",
        headline=f"the gradient of {short_list(names, 3)} is not finite when the optimizer steps",
        explanation="The graph is gone by now, so that the place is not known; at level forensic the op is found as it runs.",
        confidence="likely",
    )


RULE = Rule(
    code="GG502",
    name="nonfinite-backward",
    summary="the gradient is NaN or infinite though the loss is finite: names the op whose derivative broke",
    recognise=recognise,
    moments=frozenset({"before_backward", "after_backward", "before_step"}),
    severity="warning",
    screen=screen,
    idle=idle,
    ahead=AHEAD,
)
