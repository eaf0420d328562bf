"""# GG501 nonfinite-forward

## What it is
The loss is NaN or infinite when `backward()` is called (or PyTorch itself refuses a value that is not finite).

## Why it is wrong
Every gradient of such a loss is NaN; one optimizer step with it and the weights are NaN for good. The loss is only where it
shows: somewhere before it, one op made a non-finite value of finite operands.

## Example
```python
probs = logits.softmax(-1)
entropy = -(probs * probs.log()).sum(-1)  # 0 * log(0) is NaN as soon as one probability underflows
```

## Use instead
```python
entropy = -(probs * logits.log_softmax(-1)).sum(-1)
```

## Fix safety
Manual: clamping, masking and rescaling change what is computed where it was undefined.

## When it speaks, what silences it
At the first backward() on a non-finite scalar loss, in every level: the graph is still alive then and tells which op was
the first. It speaks once until the loss has been finite again. Infinities that were put in on purpose and handled (masked
attention scores) are no cause. With a GradScaler in use a scaled loss that overflowed is left to it; a loss that is NaN
before scaling is told when it happens twice in a row. The line search of LBFGS may try points at which the loss is not
finite. On a GPU an untraced step is looked at a step later, without synchronisation.
`# gradguard: ignore[GG501]` on the op's line silences it.
"""

from __future__ import annotations

import torch

from gradguard.analysis.incident import Incident
from gradguard.core.diagnosis import Diagnosis
from gradguard.monitors.numerics import AHEAD, Numbers, odd
from gradguard.rules.base import Rule
from gradguard.rules.numerics.expected_overflow import overflow_of_scaler, searching_line
from gradguard.rules.numerics.explosion import diverged
from gradguard.rules.numerics.gg501_nonfinite_forward import raised
from gradguard.rules.numerics.gg501_nonfinite_forward.forward_diagnosis import describe, investigate
from gradguard.rules.numerics.gg501_nonfinite_forward.outside import poisoned


def recognise(incident: Incident) -> Diagnosis | None:
    numbers = incident.notes[Numbers]
    if incident.error is not None:
        return raised.recognise(incident, numbers)
    if not numbers.loss_bad or numbers.told is not None:
        return None
    if searching_line(incident, numbers):
        return None
    root = next((root for root in incident.roots if isinstance(root, torch.Tensor) and not bool(torch.isfinite(root).all())), None)
    if root is None or overflow_of_scaler(incident, numbers, root):
        return None
    values, origin = investigate(incident, numbers, root)
    found = diverged(incident, numbers, values, origin, root)
    if found is None and origin is not None:
        found = (
            poisoned(incident, numbers, root, values, origin, "the loss")
            if origin.kind != "op"
            else describe(incident, numbers, root, values, origin, "the loss")
        )
    if found is not None:
        numbers.told = found
        numbers.pending = None
    return found


RULE = Rule(
    code="GG501",
    name="nonfinite-forward",
    summary="the loss is NaN or infinite: names the op that made the first such value",
    recognise=recognise,
    moments=frozenset({"error", "before_backward"}),
    severity="warning",
    screen=odd,
    ahead=AHEAD,
    priority=-10,
    messages=raised.MESSAGES,
)
