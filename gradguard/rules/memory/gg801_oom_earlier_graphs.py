"""# GG801 oom-earlier-graphs

## What it is
Memory ran out, and what holds it are the graphs of earlier steps: something keeps tensors that have a graph from step to step.

## Why it is wrong
A tensor with a grad_fn keeps everything that its backward would need. Those graphs are of no use any more: the optimizer has stepped since.

## Example
    loss.backward()
    optimizer.step()
    history.append(criterion(model(check), labels))

## Use instead
    history.append(criterion(model(check), labels).item())

## Fix safety
Safe where the value is only looked at (logging, running statistics): values stay the same.

## When it speaks, what silences it
Where an exception that says that memory could not be had leaves the guard, and graphs made before the optimizer's last step have saved at
least as much as was asked for, and a quarter of what all tensors hold. GG608 says the same of a run that has not run out yet.
"""

from __future__ import annotations

from gradguard.analysis.incident import Incident
from gradguard.analysis.memory.allocations import allocation
from gradguard.core.account import size
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.rules.base import Rule
from gradguard.rules.keepers import Kept, keepers
from gradguard.rules.memory.wording import AVOID, asked, breakdown, ran_out

CODE, NAME = "GG801", "oom-earlier-graphs"
_LOOKED_AT = 12


def recognise(incident: Incident) -> Diagnosis | None:
    """Who keeps the graphs of earlier steps."""
    failed = allocation(incident)
    if failed is None or failed.is_elsewhere:
        return None
    old = failed.account.total("older graphs")
    if old < max(failed.asked, failed.held // 4, 1):
        return None
    tensors = failed.older()
    found = keepers(incident, tensors, failed.own(), _LOOKED_AT)
    if not found:
        return None
    kept = Kept(incident, found)
    steps = len({tag for _, tags in tensors for tag in tags})
    verb = "keep" if len(kept.names) > 1 else "keeps"
    many = f"the graphs of {steps} earlier steps" if steps > 1 else "the graph of an earlier step"
    failing = [] if incident.place is None else [incident.place.span(f"{asked(failed)} could not be had here", "context")]
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"{ran_out(failed)}: {kept.subject} {verb} {many}, {size(old)}",
        culprit=kept.culprit(),
        related=[*kept.related(), *failing],
        explanation=f"{size(old)} of the {size(failed.held)} that tensors hold are what graphs made before the last optimizer step have "
        f"saved for backward. They hang on {kept.subject}: a tensor with a grad_fn holds everything it was computed from.",
        notes=breakdown(failed),
        fixes=[kept.fix() if steps > 1 or kept.main[0].holding.owner is not None else _let_go(kept)],
        avoid=AVOID,
    )


def _let_go(kept: Kept) -> Fix:
    """Of a variable that has the last step's value until it gets this one's."""
    return Fix(
        title=f"Let {kept.subject} go before the next forward (`del {kept.names[0]}`), or call backward without `retain_graph=True`",
        detail="A variable keeps its value until it gets another one, which is after the next graph has been made.",
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="memory ran out, held by the graphs of earlier steps",
    recognise=recognise,
    priority=9,
)
