"""# GG302 detached

## What it is
The value left the graph on its way to the loss: through `.detach()` or `.data`, as a Python number (`item()`, `float()`),
as a numpy array, by being copied into a new tensor (`torch.tensor([...])`, `Variable(...)`), or because gradients were
taken without `create_graph=True`. The other way round too: a tensor that still has its graph is sent to another process,
where only a detached one can go.

## Why it is wrong
What is computed from a detached value has no path back to the parameters. backward() raises ("element 0 of tensors does
not require grad and does not have a grad_fn"), or, when the value was made a leaf by hand, runs and trains nothing.

## Example
```python
losses = torch.tensor([criterion(model(x), y) for x, y in batch])
losses.mean().backward()
```

## Use instead
```python
losses = torch.stack([criterion(model(x), y) for x, y in batch])
losses.mean().backward()
```

## Fix safety
Dropping a `.detach()` changes what is computed, so patches are marked unsafe.

## When it speaks, what silences it
When backward() or autograd.grad raises over a root without a graph, when a Python number is asked for `.backward()`, and
as a warning when backward() is called on a leaf that was made from computed values. Of several detaches only those on the
way to this root count; a target or a mask that is detached beside the culprit is mentioned, not blamed.
"""

from __future__ import annotations

from gradguard.analysis.incident import Incident
from gradguard.core.diagnosis import Diagnosis
from gradguard.rules.base import Rule
from gradguard.rules.gradient_path import lost_path
from gradguard.rules.gradient_path.gg302_detached import not_a_tensor, serialized, starved


def recognise(incident: Incident) -> Diagnosis | None:
    """The likeliest place where the root lost its path detached, copied or converted it."""
    if incident.says(*serialized.MESSAGES):
        return serialized.recognise(incident)
    if incident.says(*not_a_tensor.MESSAGES):
        return not_a_tensor.recognise(incident, "GG302")
    if incident.says(*starved.MESSAGES):
        return starved.recognise(incident, "GG302")
    return lost_path.recognise(incident, "GG302")


RULE = Rule(
    code="GG302", name="detached", summary="a value left the graph on its way to the loss", recognise=recognise,
    moments=frozenset({"error", "before_backward"}), priority=50,
    messages=(*lost_path.MESSAGES, *serialized.MESSAGES, *starved.MESSAGES, *not_a_tensor.MESSAGES),
    traced_only=True, screen=lost_path.screen_fresh,
)  # fmt: skip
