"""# GG713 set-epoch

## What it is
A DistributedSampler that shuffles gives the same order in every epoch: `set_epoch` is never called.

## Why it is wrong
The order is made from the sampler's seed and its epoch, so that all ranks agree on it. As long as nobody sets the epoch it is that of
epoch 0: each rank sees the same samples in the same batches again and again, and never those of the others.

## Example
    for epoch in range(10):
        for x, y in loader:                # its sampler shuffles by epoch 0 each time
            ...

## Use instead
    for epoch in range(10):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            ...

## Fix safety
Unsafe: the order of the samples changes, which is the purpose.

## When it speaks, what silences it
At the third pass in one order over a loader, where the optimizer has stepped in each, and steps in a loop over that loader now. A sampler
that does not shuffle is meant to keep its order, and one of a loader that is only evaluated may.
"""

from __future__ import annotations

from typing import Any

from gradguard.analysis.incident import Incident
from gradguard.analysis.places import loaders
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.core.moments import Moment
from gradguard.probes import sampler_epochs
from gradguard.rules.base import Rule

CODE, NAME = "GG713", "set-epoch"


def screen(memory: dict[str, Any], moment: Moment, facts: dict[str, Any], traced: bool) -> bool:
    """Whether a sampler has repeated its order."""
    return bool(sampler_epochs.repeated)


def idle(memory: dict[str, Any]) -> bool:
    """None has."""
    return not sampler_epochs.repeated


def recognise(incident: Incident) -> Diagnosis | None:
    """The loop over the sampler's loader."""
    samplers = [ref() for ref in sampler_epochs.repeated]
    sampler_epochs.repeated.clear()
    loader = loaders.around(incident)
    if loader is None or not any(each is loader.sampler for each in samplers):
        return None
    name = f"{loader.name}.sampler"
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"every epoch goes through `{loader.name}` in the same order: `{name}.set_epoch` is not called",
        culprit=loader.header("gets the same batches again"),
        explanation="A DistributedSampler makes its order from its seed and its epoch. As long as nobody sets the epoch, each rank gets "
        "the same samples in the same batches, and never those of the others.",
        fixes=[Fix(title=f"Call `{name}.set_epoch(epoch)` before this loop, in every epoch", safety="unsafe")],
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="a DistributedSampler gives the same order in every epoch",
    recognise=recognise,
    moments=frozenset({"before_step"}),
    severity="warning",
    screen=screen,
    idle=idle,
)
