"""# GG503 exploding-gradient

## What it is
Training blows up: the loss grows by orders of magnitude step after step until it overflows, or one step applies a gradient
that is far larger than all before.

## Why it is wrong
The op that overflows first is not to blame; the weights are. A learning rate beyond what the curvature allows makes every step
overshoot further; a long chain of multiplications (a recurrent net, a deep stack without normalisation) makes gradients that
throw the weights far off in one step.

## Example
```python
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # features up to 64: stable below about 1e-4
```

## Use instead
```python
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
...
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
```

## Fix safety
Manual: the learning rate and the clipping norm are yours to choose.

## When it speaks, what silences it
When the loss is no longer finite and had grown a million times or more over four or more steps in a row, or when the last
gradient was fifty times or more the usual one; also when a loss that is still finite has grown 10^12 times over eight or more steps in a
row and has driven weights beyond a million. `# gradguard: ignore[GG503]` on the optimizer's line silences it.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field

from gradguard.analysis.graph.node_values import GraphValues
from gradguard.analysis.incident import Incident
from gradguard.core.diagnosis import Diagnosis
from gradguard.instrumentation.event_buffer import ODD
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.numerics import AHEAD, Numbers, odd
from gradguard.rules.base import Rule
from gradguard.rules.numerics.explosion import diverged, growth


class Options(BaseModel):
    """What can be set under `rules: {GG503: ...}`."""

    model_config = ConfigDict(extra="forbid")

    steps: int = Field(default=8, ge=2, le=60, description="steps in a row in which the loss grew before it speaks of a finite loss")
    growth: float = Field(default=1e12, gt=1.0, description="how many times larger the loss has become over them")


def _grows(incident: Incident, state: Numbers) -> bool:
    losses = state.plan.losses
    if state.loss_bad or state.told is not None or not losses or not abs(losses[-1]) > ODD:
        return False
    options: Options = incident.options(RULE)
    steps, factor = growth(list(losses))
    return steps >= options.steps and factor >= options.growth


def recognise(incident: Incident) -> Diagnosis | None:
    if not _grows(incident, incident.notes[Numbers]) or any(book.stale >= 2 for book in incident.notes[Ledger].books.values()):
        return None  # gradients pile up: that is told, and the growth follows from it
    numbers = incident.notes[Numbers]
    root = next((root for root in incident.roots if isinstance(root, torch.Tensor)), None)
    found = diverged(incident, numbers, GraphValues(incident.root_nodes), None, root)
    numbers.told = found or numbers.told
    return found


RULE = Rule(
    code="GG503",
    name="exploding-gradient",
    summary="training diverges: the loss or the gradient grows by orders of magnitude up to overflow",
    recognise=recognise,
    moments=frozenset({"before_backward"}),
    severity="warning",
    screen=odd,
    ahead=AHEAD,
)
