"""# GG304 non-differentiable-op

## What it is
The loss was computed through an operation without a derivative: a comparison, `argmax`, the indices of `max` or `topk`, a
cast to integers or booleans, a histogram, a draw with `sample()`; or through one whose derivative is zero everywhere
(`round`, `floor`, `sign`), or at the values in question (a clamp of a parameter that lies outside the range, the product of two
parameters that are both zero), which runs and trains nothing.

## Why it is wrong
Such operations jump between values: there is no slope to follow. PyTorch ends the graph there (or multiplies by zero).

## Example
```python
predicted = model(x).argmax(dim=1)
loss = (predicted != labels).float().mean()
loss.backward()
```

## Use instead
```python
loss = torch.nn.functional.cross_entropy(model(x), labels)
```

## Fix safety
No automatic change, except `sample()` to `rsample()` (unsafe: it changes what is computed).

## When it speaks, what silences it
When backward() or autograd.grad raises over a root without a graph that was lost in such an operation; as a warning when
the result was made a leaf by hand, and when every path from the root to the parameters leads through an operation whose
derivative is zero everywhere; of some of the parameters, when an optimizer steps on gradients of exactly zero for the third time.
A hard value beside a soft path (a straight-through estimator, a mask) is none of that.
"""

from __future__ import annotations

from gradguard.analysis.incident import Incident
from gradguard.core.diagnosis import Diagnosis
from gradguard.rules.base import Rule
from gradguard.rules.gradient_path import lost_path
from gradguard.rules.gradient_path.gg304_non_differentiable_op import zero_derivative


def recognise(incident: Incident) -> Diagnosis | None:
    """The likeliest place where the root lost its path has no derivative."""
    found = lost_path.recognise(incident, "GG304") if incident.moment != "before_step" else None
    if found is None and incident.moment != "error":
        return zero_derivative.recognise(incident)
    return found


RULE = Rule(
    code="GG304", name="non-differentiable-op", summary="the loss was computed through an operation without a "
                                                        "derivative", recognise=recognise,
    moments=frozenset({"error", "before_backward", "before_step"}), priority=50, messages=lost_path.MESSAGES, traced_only=True,
    screen=zero_derivative.screen,
)  # fmt: skip
