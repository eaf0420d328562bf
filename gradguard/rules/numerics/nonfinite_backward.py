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
Right before an optimizer would apply such a gradient, so the weights are not lost where the policy raises. One small parameter's
gradient is looked at after every backward, all of them in the first steps, in traced steps, and as often as that costs next to
nothing. Loops that look at the gradients themselves and skip the step, and `GradScaler`, never step with such a gradient and hear
nothing. It speaks once until training has recovered. `# gradguard: ignore[GG502]` on the op's line silences it.
"""

from __future__ import annotations

from typing import Any

from gradguard.diagnosis import Diagnosis
from gradguard.rules.base import Moment, Rule
from gradguard.rules.incident import Incident
from gradguard.rules.numerics.backward import blame, finite
from gradguard.rules.numerics.scaling import scaler_in_use
from gradguard.rules.numerics.watching import numbers, pulse


def screen(memory: dict[str, Any], moment: Moment, facts: dict[str, Any], traced: bool) -> bool:
    state = numbers(memory)
    if moment == "before_backward":
        state.before_backward(facts, traced)
        return False
    if moment == "after_backward":
        if state.after_backward(facts, traced):
            return state.told is None
        state.release()
        return False
    return state.pending is not None


def idle(memory: dict[str, Any]) -> bool:
    """No gradient found non-finite waits for its optimizer's step."""
    return numbers(memory).pending is None


def recognise(incident: Incident) -> Diagnosis | None:
    memory = numbers(incident.memory)
    if incident.moment == "after_backward":
        try:
            memory.pending = None if scaler_in_use(memory) else blame(incident, memory)
        finally:
            memory.release()
        return None
    found = memory.pending
    if found is None or memory.told is not None:
        return None
    parameters = [p for group in incident.optimizer.param_groups for p in group["params"]]
    if all(p.grad is None or finite(p.grad) for p in parameters):
        return None
    memory.pending, memory.told = None, found
    return found


RULE = Rule(
    code="GG502",
    name="nonfinite-backward",
    summary="the gradient is NaN or infinite though the loss is finite: names the op whose derivative broke",
    recognise=recognise,
    moments=frozenset({"before_backward", "after_backward", "before_step"}),
    severity="warning",
    screen=screen,
    idle=idle,
    pulse=pulse,
)
