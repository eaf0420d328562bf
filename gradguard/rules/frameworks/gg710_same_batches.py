"""# GG710 same-batches

## What it is
Every rank of a DistributedDataParallel module trains on the same batches: the loader has no DistributedSampler, or one that was made
for a single process.

## Why it is wrong
DDP averages gradients that are already equal. However many ranks there are, the job learns what one of them would learn alone, at the
same pace.

## Example
    loader = DataLoader(data, batch_size=32)                   # the same order on every rank
    for x, y in loader:
        criterion(ddp(x), y).backward()

## Use instead
    sampler = DistributedSampler(data)                         # another share of the data on each
    loader = DataLoader(data, batch_size=32, sampler=sampler)

## Fix safety
Unsafe: each rank trains on other samples, which is the purpose.

## When it speaks, what silences it
When the ranks have given DDP the same inputs and got the same loss at three of an optimizer's first steps in a row, with new inputs at
each, in a loop over a DataLoader. The ranks of other process groups (tensor or pipeline parallel) are not compared. A batch that is
repeated at every step, a model that takes its rank's part of the inputs, and noise that differs between ranks are silent.
"""

from __future__ import annotations

from torch.utils.data import DistributedSampler

from gradguard.analysis.incident import Incident
from gradguard.analysis.live import loaders
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.core.safe_read import peek
from gradguard.monitors import replica_drift
from gradguard.probes.replicas import Alike
from gradguard.rules.base import Rule
from gradguard.rules.frameworks import ddp as shared

CODE, NAME = "GG710", "same-batches"


def recognise(incident: Incident) -> Diagnosis | None:
    """The loader that gives every rank the same."""
    alike = incident.finding
    if not isinstance(alike, Alike):
        return None
    name = shared.name_of(incident, alike.ddp)
    loader = loaders.around(incident)
    if loader is None:  # data that a program makes up may be the same on purpose
        return None
    made = loaders.made(incident, loader.name, "DataLoader", "gives every rank the same batches")
    sampler, shown = loader.sampler, loader.name
    replicas = peek(sampler, "num_replicas", None)
    if not isinstance(sampler, DistributedSampler):
        why = f"`{shown}` has no DistributedSampler"
        change = f"Give `{shown}` a `sampler=DistributedSampler(dataset)` in place of `shuffle`"
    elif type(replicas) is int and replicas != alike.ranks:
        why = f"the sampler of `{shown}` was made for {replicas} of them"
        change = "Make the sampler after `init_process_group`, without `num_replicas` and `rank`"
    elif type(rank := peek(sampler, "rank", None)) is int:
        why = f"the sampler of `{shown}` was made for rank {rank} on each"
        change = "Make the sampler with this process's own `rank`, or without it"
    else:
        return None
    wrapped = shared.made(incident, alike.ddp, "averages gradients that are equal already")
    steps = ", ".join(map(str, alike.steps))
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"all {alike.ranks} ranks train `{name}` on the same batches: {why}",
        culprit=made,
        related=[wrapped] if wrapped is not None else [],
        explanation="DDP averages gradients that are already equal: the job learns what one rank would learn alone, at the same pace.",
        notes=[f"at the optimizer's steps {steps} the inputs of all ranks were equal, and so were their losses"],
        fixes=[Fix(title=change, safety="unsafe")],
        confidence="certain" if made is not None else "likely",
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="all ranks of a DistributedDataParallel module train on the same batches",
    recognise=recognise,
    moments=frozenset({"before_backward", "after_backward", "before_step"}),
    severity="warning",
    screen=replica_drift.screen,
    idle=replica_drift.idle,
)
