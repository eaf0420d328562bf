"""# GG707 ranks-out-of-step

## What it is
The ranks of a process group do not make the same collectives: one has fewer batches and leaves the loop, a call stands under a
condition that does not hold on every rank, two calls come in another order, or tensors of different shapes or dtypes meet.

## Why it is wrong
A collective is over when every rank of its group has made it. Ranks pair their calls by order alone: the first of one rank with
the first of the others. A call that a rank leaves out is never made up for, and the others wait until the time limit of the process
group, or read what was meant for another call.

## Example
    for x, y in loader:                  # one batch fewer on the last rank
        loss = criterion(model(x), y)
        loss.backward()
        dist.all_reduce(loss)            # the other ranks wait here

## Use instead
    sampler = DistributedSampler(data)   # as many samples on every rank
    loader = DataLoader(data, batch_size, sampler=sampler, drop_last=True)

## Fix safety
Manual: which ranks make a call, and how many batches they get, is the program's design.

## When it speaks, what silences it
When a collective has been under way for longer than `ranks.patience` (30 s) and the other ranks' positions show that it can never be
over, and when the connection between ranks breaks or times out. A rank that is only slow is no trouble of this kind (GG709).
"""

from __future__ import annotations

from gradguard.analysis.incident import Incident
from gradguard.core import ranks
from gradguard.core.diagnosis import Diagnosis
from gradguard.rules.base import Rule
from gradguard.rules.frameworks import standings
from gradguard.rules.frameworks.gg707_ranks_out_of_step import differences, fewer

CODE, NAME = "GG707", "ranks-out-of-step"


def recognise(incident: Incident) -> Diagnosis | None:
    """In what the ranks differ, and which line makes them."""
    standing = standings.standing(incident)
    if standing is None or standing.failed:
        return None
    found = differences.found(standing)
    if found is None and not (standing.gone and not standing.stall.error):
        found = fewer.found(standing)
    return None if found is None else found.model_copy(update={"code": CODE, "name": NAME})


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="the ranks do not make the same collectives",
    recognise=recognise,
    moments=frozenset({"error", "finding"}),
    messages=ranks.LOST,
    priority=28,
)
