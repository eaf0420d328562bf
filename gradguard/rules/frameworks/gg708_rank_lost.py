"""# GG708 rank-lost

## What it is
A rank has failed with an error of its own, or is gone without a word (killed, out of memory), and the others wait for it or have
lost the connection to it.

## Why it is wrong
What the other ranks show is only the consequence: "connection closed by peer", or a wait until the time limit of the process group.
The cause stands in the output of the one rank that failed first.

## Example
    loss = criterion(model(x), y)        # rank 3: a label out of range
    dist.all_reduce(loss)                # ranks 0 to 2: connection closed by peer

## Use instead
    y = y.clamp(max=classes - 1)         # whatever repairs the first failure

## Fix safety
Manual: the failure of the other rank is what is to be repaired.

## When it speaks, what silences it
When a collective fails or has been under way for longer than `ranks.patience`, and another rank has left word of an exception or
does not answer though it did before.
"""

from __future__ import annotations

from gradguard.analysis.incident import Incident
from gradguard.core import ranks
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.rules.base import Rule
from gradguard.rules.frameworks import standings
from gradguard.rules.frameworks.standings import Standing, named, short, span, what

CODE, NAME = "GG708", "rank-lost"


def recognise(incident: Incident) -> Diagnosis | None:
    """Which rank is lost, and what it has said of that itself."""
    standing = standings.standing(incident)
    if standing is None:
        return None
    return _failed(standing) if standing.failed else _gone(standing)


def _failed(standing: Standing) -> Diagnosis:
    first, *more = standing.failed
    at = f" at {short(first.place)}" if first.place is not None else ""
    shown = () if first.place is None else (first.rank,)
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"rank {first.rank} failed first{at}: {first.error or 'it raised an exception'}",
        culprit=None if first.place is None else span(first.place, f"rank {first.rank} failed here", "culprit"),
        related=standing.spans(but=shown),
        explanation=f"{standing.waits()}; the collective needs rank {first.rank}, which has ended.",
        notes=[f"rank {each.rank} failed too: {each.error}" for each in more[:4]],
        fixes=[Fix(title=f"Repair what rank {first.rank} raised; its own output has the traceback", safety="manual")],
        avoid=["a longer timeout of the process group: the rank does not come back"],
    )


def _gone(standing: Standing) -> Diagnosis | None:
    gone = standing.gone
    if not gone or standing.difference() is not None:  # gloo ends a process that gets more than it expects: GG707
        return None
    few = [each.rank for each in gone]
    last = next((each for each in gone if each.place is not None), None)
    place = None if last is None else last.place
    answered = place is not None and bool(place.function)  # what its file tells is the line of its last collective, and no more
    where = "" if place is None else f", {'last seen' if answered else 'its last collective was'} at {short(place)}"
    does = "does not answer" if len(few) == 1 else "do not answer"
    it = "It has" if len(few) == 1 else "They have"
    own, waiting = standing.own.place, named(each.rank for each in standing.waiting)
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"{standing.waits()}; {named(few)} {does}{where}: gone or stopped",
        culprit=span(place, f"{named(few)} was last seen here", "culprit") if place is not None and answered else None,
        related=[
            *([span(own, f"{waiting} here, in {what(standing.own.doing or 'a collective')}")] if own is not None else []),
            *([span(place, f"{named(few)} made its last collective here")] if place is not None and not answered else []),
        ],
        explanation=f"{it} left no word of an exception: the process was killed (by the system for want of memory, by the scheduler, by a "
        "crash in C++), is stopped, or its machine is unreachable.",
        notes=_shapes(standing),
        fixes=[Fix(title=f"Look at how the process of {named(few)} ended: exit status, `dmesg`, the scheduler's log", safety="manual")],
        avoid=["a longer timeout of the process group: a process that is gone does not come back"],
        confidence="likely",
    )


def _shapes(standing: Standing) -> list[str]:
    """Whether this rank has just brought another shape than at the same line before: gloo ends the process that expected fewer bytes."""
    own = standing.own
    made = [each for each in own.past if each.group == own.group]
    if not made or made[-1].number != own.number or made[-1].shape is None:
        return []
    last = made[-1]
    before = [each for each in made[:-1] if (each.kind, each.file, each.line) == (last.kind, last.file, last.line)]
    if not before or (before[-1].shape, before[-1].dtype) == (last.shape, last.dtype):
        return []
    now, then = (f"{list(each.shape or ())} of {each.dtype}" for each in (last, before[-1]))
    return [
        f"this rank brought {now} to `{last.kind}`, and {then} the time before: gloo ends a process that gets more bytes than it expects"
    ]


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="another rank has failed or is gone, and this one waits for it",
    recognise=recognise,
    moments=frozenset({"error", "finding"}),
    messages=ranks.LOST,
    priority=29,
)
