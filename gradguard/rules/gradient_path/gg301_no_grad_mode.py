"""# GG301 no-grad-mode

## What it is
The loss, or something it was computed from, was computed with grad mode off: inside `with torch.no_grad():`, in a function
decorated with it, after a `torch.set_grad_enabled(False)` that nothing undid, or in a loop over a generator that yields
inside its `no_grad` block.

## Why it is wrong
With grad mode off PyTorch records no graph, also for inputs that require grad. backward() then finds nothing to follow
("element 0 of tensors does not require grad and does not have a grad_fn").

## Example
```python
with torch.no_grad():
    features = encoder(images)      # the encoder is meant to learn
loss = criterion(head(features).detach() + features.mean())
loss.backward()
```

## Use instead
```python
features = encoder(images)
```
To keep a module fixed and still send gradients through it, freeze its parameters: `encoder.requires_grad_(False)`.

## Fix safety
No automatic change: what else stands in the block may be there for a reason.

## When it speaks, what silences it
When backward() or autograd.grad raises over a root without a graph and grad mode was off where its path ended; and, as a
warning, when such a value was made a leaf by hand (`requires_grad_(True)`). Evaluation under no_grad is never looked at.
"""

from __future__ import annotations

from gradguard.analysis.incident import Incident
from gradguard.core.diagnosis import Diagnosis
from gradguard.rules.base import Rule
from gradguard.rules.gradient_path import lost_path


def recognise(incident: Incident) -> Diagnosis | None:
    """The likeliest place where the root lost its path ran with grad mode off."""
    return lost_path.recognise(incident, "GG301")


RULE = Rule(
    code="GG301", name="no-grad-mode", summary="the loss was computed with grad mode off", recognise=recognise,
    moments=frozenset({"error", "before_backward"}), priority=50, messages=lost_path.MESSAGES, traced_only=True, screen=lost_path.screen,
)  # fmt: skip
