"""# GG709 slow-rank

## What it is
Some ranks have waited in a collective for longer than `ranks.patience`, and the rank that they wait for is alive and busy: in its data
loader, in a save, in an evaluation, in a longer computation.

## Why it is wrong
It need not be: a checkpoint that one rank writes takes as long as it takes. The others do nothing meanwhile, and where the wait
exceeds the time limit of the process group the job fails.

## Example
    if rank == 0:
        torch.save(model.state_dict(), path)     # 40 s
    dist.barrier()                               # the other ranks wait here

## Use instead
    dist.init_process_group("nccl", timeout=timedelta(minutes=60))    # longer than what one rank does alone

## Fix safety
Manual: training goes on by itself.

## When it speaks, what silences it
Once a collective, as information; a warning level never raises it. Other ranks that can no longer come are GG707 or GG708.
"""

from __future__ import annotations

from gradguard.analysis.incident import Incident
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.rules.base import Rule
from gradguard.rules.frameworks import standings
from gradguard.rules.frameworks.standings import named, short, span

CODE, NAME = "GG709", "slow-rank"


def recognise(incident: Incident) -> Diagnosis | None:
    """Whom the ranks wait for, and what it does."""
    standing = standings.standing(incident)
    if standing is None or standing.stall.error:
        return None
    slow = [each for each in standing.behind if each.state in ("runs", "waits")]
    if not slow or len(slow) != len(standing.behind):
        return None
    few = [each.rank for each in slow]
    first = slow[0]
    at = f" at {short(first.place)}" if first.place is not None else ""
    doing = f"in {first.doing}{at}" if first.doing else (at.strip() or "busy")
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="info",
        headline=f"{standing.waits()} for {named(few)}, which {'is' if len(few) == 1 else 'are'} {doing}",
        culprit=None if first.place is None else span(first.place, f"{named(few)} {'is' if len(few) == 1 else 'are'} here", "culprit"),
        related=standing.spans(but=few),
        explanation="The ranks that wait do nothing meanwhile. Training goes on when the other has come; if that takes longer than the "
        "time limit of the process group, the job fails.",
        fixes=[
            Fix(title="Leave it as it is where it is meant, as for a checkpoint or an evaluation on one rank", safety="manual"),
            Fix(title="Share the work: give every rank as much to load, evaluate or save", safety="manual"),
        ],
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="ranks wait for one that is busy with something else",
    recognise=recognise,
    moments=frozenset({"finding"}),
    severity="info",
    priority=10,
)
