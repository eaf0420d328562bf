"""# GG703 ddp-no-sync

## What it is
The gradients that an optimizer steps with were never averaged over the ranks: the last micro-batch before the step ran under
`no_sync()` too, or forward ran the wrapped module itself (`ddp.module(x)`), which DDP does not see.

## Why it is wrong
Each rank then trains a model of its own on its share of the data, and the models drift apart; what is saved is one of them.

## Example
    for i, (x, y) in enumerate(loader):
        with ddp.no_sync():
            criterion(ddp(x), y).backward()
        if (i + 1) % 4 == 0:
            optimizer.step()

## Use instead
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % 4 == 0
        with contextlib.nullcontext() if last else ddp.no_sync():
            criterion(ddp(x), y).backward()
        if last:
            optimizer.step()

## Fix safety
Unsafe: what is computed changes, which is the purpose.

## When it speaks, what silences it
At the first steps, where the wrapped module was run past DDP and nothing was exchanged between the ranks from the start of
`backward()` to the optimizer's step. Else at the second step at which the gradients of the ranks differ (they are compared at
steps 2, 3, 4, 5, 8, 16, 32, 64 and every 100th). Programs that average gradients or parameters themselves (local SGD, a loop of
`all_reduce`), and modules with a communication hook, are silent.
"""

from __future__ import annotations

import ast

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import resolve, span_of
from gradguard.analysis.program.index import writes_in
from gradguard.analysis.program.user_calls import calls, user_files
from gradguard.analysis.program.user_files import sources_of
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.monitors import replica_drift, unaveraged_gradients
from gradguard.probes.replicas import Drift
from gradguard.rules.base import Rule
from gradguard.rules.frameworks import averaging
from gradguard.rules.frameworks import ddp as shared

CODE, NAME = "GG703", "ddp-no-sync"


def recognise(incident: Incident) -> Diagnosis | None:
    """Gradients differ between ranks, because of `no_sync` or a forward past DDP."""
    drift = incident.finding
    if not isinstance(drift, Drift) or not drift.gradients or averaging.averaged_by_hand(incident):
        return None
    name = shared.name_of(incident, drift.ddp)
    if drift.compared and getattr(drift.ddp, "require_forward_param_sync", None) is False:
        where = _no_sync(incident)
        if where is not None or any(calls(incident, "no_sync")):
            return _tell(
                incident, drift, where,
                f"every micro-batch of a step runs under `no_sync`: `{name}`'s gradients are never averaged over the ranks",
                "Under `no_sync` DDP leaves each rank's gradients as they are, and averages what has gathered in the first backward "
                "outside of it. Here the last micro-batch before the optimizer's step is inside as well.",
                Fix(
                    title="Leave `no_sync` for the last micro-batch before the step",
                    safety="unsafe",
                    detail="DDP decides in forward: run that outside as well.",
                ),
            )  # fmt: skip
    if drift.unhooked or len(drift.past) != 1 or not (unaveraged_gradients.ran(drift.ddp) or incident.names.of(drift.ddp)):
        return None
    site, handed = next(iter(drift.past.items()))
    place = resolve(site)
    if place is None:
        return None
    called = ast.unparse(place.node.func) if isinstance(place.node, ast.Call) else place.text
    label, title = (
        f"runs the wrapped module; `{name}` does not see it",
        f"Call `{name}(...)` in training; keep `{called}` for evaluation and saving",
    )
    detail = None
    if handed:
        label = f"is given the module inside `{name}`, and runs it: DDP does not see that"
        title = f"Hand `{name}` itself to `{called}(...)` where the loss is computed"
        detail = "Keep the module inside for generation, evaluation and saving."
    return _tell(
        incident, drift, place.span(label, "culprit"),
        f"`{called}(...)` runs the module inside `{name}` and goes past DDP: its gradients are never averaged over the ranks",
        "DDP gets ready to average gradients in its own forward. A forward of the wrapped module itself leaves them as each rank "
        "computed them.",
        Fix(title=title, safety="unsafe", detail=detail),
    )  # fmt: skip


def _no_sync(incident: Incident) -> SourceSpan | None:
    backward = incident.journal.backwards[-1] if incident.journal.backwards else None
    label = "still open in the last micro-batch before the step"
    sites = [] if backward is None else list(dict.fromkeys([backward.site, *backward.stack]))
    for site in sites:
        place = resolve(site)
        for block in place.enclosing_withs() if place is not None else ():
            if "no_sync" in block.text:
                return block.span.model_copy(update={"label": label, "role": "culprit"})
    found = [(file, node) for file, node in calls(incident, "no_sync")]
    if not found:
        return _switched_by_hand(incident)
    return span_of(*found[0], label=label, role="culprit") if len(found) == 1 else None


def _switched_by_hand(incident: Incident) -> SourceSpan | None:
    found = [
        source.span_of(write.node, "switches the averaging off", "culprit")
        for source, write in writes_in(sources_of(user_files(incident)), "require_backward_grad_sync")
    ]
    return found[0] if len(found) == 1 else None


def _tell(incident: Incident, drift: Drift, culprit: SourceSpan | None, headline: str, why: str, fix: Fix) -> Diagnosis:
    drift.told = True
    step = incident.place
    related = [] if step is None else [step.span("steps with this rank's own gradients")]
    made = shared.made(incident, drift.ddp, "wrapped here")
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=headline,
        culprit=culprit,
        related=[*related, *([made] if made is not None else [])],
        tensors=shared.facts(drift.ddp, drift.names),
        explanation=f"{why} The ranks' models drift apart.",
        notes=[drift.evidence],
        fixes=[fix],
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="an optimizer steps with gradients that DDP never averaged over the ranks",
    recognise=recognise,
    moments=frozenset({"before_step"}),
    priority=10,
    severity="warning",
    screen=replica_drift.screen,
    idle=replica_drift.idle,
)
