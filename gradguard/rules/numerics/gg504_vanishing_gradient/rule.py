"""# GG504 vanishing-gradient

## What it is
A saturated op lets no gradient through: whole layers get a gradient of zero (or far below what any step can use) for many
steps while the loss does not improve.

## Why it is wrong
The derivative of a sigmoid or tanh that has run into its limits is zero, as is that of a ReLU whose input is never positive.
Nothing before it learns any more, and nothing says so.

## Example
```python
return torch.sigmoid(self.main(x))  # outputs are exactly 0 or 1: no gradient comes back
```

## Use instead
```python
return self.main(x)  # a loss on the raw score: BCEWithLogits, least squares, hinge
```

## Fix safety
Manual: removing or replacing an activation changes the model.

## When it speaks, what silences it
After thirty backward calls in a row whose gradient at the model's far end was zero (or below 1e-9, and a million times less than it
has been), with a loss that is not near zero, and only where an op is found whose derivative is zero for the whole batch and through which
everything must pass. `# gradguard: ignore[GG504]` on the op's line silences it.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from gradguard.analysis.incident import Incident
from gradguard.core.diagnosis import Diagnosis
from gradguard.monitors.numerics import AHEAD, DEAD_STEPS, Numbers, odd
from gradguard.rules.base import Rule
from gradguard.rules.numerics.gg504_vanishing_gradient.saturation import saturated

_LEAST_LOSS = 1e-3


class Options(BaseModel):
    """What can be set under `rules: {GG504: ...}`."""

    model_config = ConfigDict(extra="forbid")

    steps: int = Field(default=DEAD_STEPS, ge=4, le=64, description="backward calls in a row with a gradient of zero before it speaks")


def _due(incident: Incident, state: Numbers) -> bool:
    """After so many steps in a row without gradient, if the loss is not simply zero."""
    plan = state.plan
    if not plan.zeros or plan.asked == plan.zeros or state.loss_bad:
        return False
    steps = incident.options(RULE).steps
    if plan.zeros < steps or plan.zeros % steps:
        return False
    plan.asked = plan.zeros
    recent = list(plan.losses)[-steps:]
    return not plan.dead_told and len(recent) >= steps // 2 and min(abs(loss) for loss in recent) >= _LEAST_LOSS


def recognise(incident: Incident) -> Diagnosis | None:
    numbers = incident.notes[Numbers]
    if not _due(incident, numbers):
        return None
    found = saturated(incident, numbers)
    if found is not None:
        numbers.plan.dead_told = True
    return found


RULE = Rule(
    code="GG504",
    name="vanishing-gradient",
    summary="a saturated op lets no gradient through to whole layers, for many steps",
    recognise=recognise,
    moments=frozenset({"before_backward"}),
    severity="warning",
    screen=odd,
    ahead=AHEAD,
)
