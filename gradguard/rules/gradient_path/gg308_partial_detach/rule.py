"""# GG308 partial-detach

## What it is
backward() works, and yet a term of the loss does not reach the parameters it was computed from: a penalty summed over
`param.data`, a distance computed through numpy, a term under no_grad, a gradient penalty without `create_graph=True`; a
latent drawn with `sample()` where `rsample()` exists; a learned weight that is detached where it matters; a penalty that is computed
and never added.

## Why it is wrong
Nothing raises. The term is added to the number that is printed, and trains nothing.

## Example
```python
loss = criterion(model(x), y) + 0.1 * model.weight.data.abs().sum()
loss.backward()
```

## Use instead
```python
loss = criterion(model(x), y) + 0.1 * model.weight.abs().sum()
loss.backward()
```

## Fix safety
Dropping `.data` or `.detach()`, and `sample()` to `rsample()`, change what is trained: unsafe, to be read before they are
applied.

## When it speaks, what silences it
In traced steps, as a warning, once a place. Only for *terms*: what is added to the loss, reached from it through sums, means
and scalings alone, and computed in this very step. Silent are targets, advantages and other factors; straight-through
estimators (`z + (q - z).detach()`) and `x - x.detach()`; values from networks that no optimizer trains; a sample whose
`log_prob` is taken, unless what a network makes of the sample is a term of its own beside it (`alpha * log_prob - q`); and a
weight that is detached here and trained by a loss of its own.

And where gradients are taken with `create_graph=True`, which makes a graph for a loss to go through, three times in a row no backward
call went through them, and what is computed from them ends in a variable that nothing reads. What is made
of such gradients and only looked at (`.item()`, `.detach()`) is silent. In the same way where the result of a custom Function
(`reversed_ = Reverse.apply(features)`) is dropped, or ends in a variable that nothing reads.
"""

from __future__ import annotations

from gradguard.analysis.incident import Incident
from gradguard.core.diagnosis import Diagnosis
from gradguard.rules.base import Rule
from gradguard.rules.gradient_path import lost_terms
from gradguard.rules.gradient_path.gg308_partial_detach import unused_graph


def recognise(incident: Incident) -> Diagnosis | None:
    """A term without a path, a sample in the way, a weight that only its regularizer trains, or a term of derivatives that is left out."""
    if incident.moment == "finding":
        return unused_graph.told(incident.finding)
    return lost_terms.recognise(incident)


RULE = Rule(
    code="GG308", name="partial-detach", summary="a part of the loss does not reach the parameters it was "
                                                 "computed from", recognise=recognise,
    moments=frozenset({"before_backward", "finding"}), severity="warning", traced_only=True, screen=lost_terms.screen,
)  # fmt: skip
