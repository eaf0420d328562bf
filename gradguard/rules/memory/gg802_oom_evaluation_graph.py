"""# GG802 oom-evaluation-graph

## What it is
Memory ran out in code that only evaluates a model, and what holds it is the graph that this code records and nobody runs backward through.

## Why it is wrong
With grad mode on each operation keeps what its backward would need: activations of every layer, and, where losses or outputs are summed up
or collected, those of every batch. `model.eval()` does not change that; it only switches dropout and batch norm.

## Example
    model.eval()
    for inputs, targets in loader:
        total += criterion(model(inputs), targets)

## Use instead
    model.eval()
    with torch.no_grad():
        for inputs, targets in loader:
            total += criterion(model(inputs), targets)

## Fix safety
Safe: values stay the same. What comes out has no graph.

## When it speaks, what silences it
Where an exception that says that memory could not be had leaves the guard, graphs that no backward call of the program begins at hold at
least as much as was asked for, and a quarter of what all tensors hold; and either all models that they come from are in eval mode, or a
variable or container keeps those of several iterations.
"""

from __future__ import annotations

from gradguard.analysis.incident import Incident
from gradguard.analysis.memory.allocations import Allocation, allocation
from gradguard.analysis.memory.evaluation import Evaluation, evaluation
from gradguard.core.account import size
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.fixes.at_places import spelt
from gradguard.fixes.statements import wrapped
from gradguard.rules.base import Rule
from gradguard.rules.keepers import Keeper, Kept, keepers
from gradguard.rules.memory.wording import AVOID, asked, breakdown, ran_out

CODE, NAME = "GG802", "oom-evaluation-graph"
_LOOKED_AT = 12


def recognise(incident: Incident) -> Diagnosis | None:
    """The loop that evaluates, or what keeps its results."""
    failed = allocation(incident)
    if failed is None or failed.stepping is not None or failed.is_elsewhere:
        return None
    saved = failed.account.total("saved")
    if saved < max(failed.asked, failed.held // 4, 1):
        return None
    found = evaluation(incident)
    if found is None:
        return None
    kept = [each for each in keepers(incident, found.kept, failed.own(), _LOOKED_AT) if found.outlasts(each.holding) and len(each.tags) > 1]
    if found.in_eval_mode:
        return _evaluates(incident, failed, found, saved, kept)
    if kept:
        return _collects(incident, failed, found, saved, Kept(incident, kept, "iteration"))
    return _builds(incident, failed, found, saved) if found.collects else None


def _evaluates(incident: Incident, failed: Allocation, found: Evaluation, saved: int, kept: list[Keeper]) -> Diagnosis:
    models = " and ".join(f"`{name}`" for name in found.models[:2]) or "the model"
    are = "are" if len(found.models) > 1 else "is"
    loop = " in every iteration" if found.loops else ""
    label = f"grad mode is on: everything here records a graph{loop}"
    related: list[SourceSpan] = []
    if kept:
        keeping = Kept(incident, kept, "iteration")
        related += [span.model_copy(update={"role": "context"}) for span in (keeping.culprit(),) if span is not None]
    if incident.place is not None:
        related.append(incident.place.span(f"{asked(failed)} could not be had here", "context"))
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"{ran_out(failed)}: an evaluation records a graph that nothing needs, {size(saved)}",
        culprit=found.span(label, "culprit"),
        related=related,
        explanation=f"{models} {are} in eval mode, and no backward call begins at what is computed here; still {size(saved)} of the "
        f"{size(failed.held)} that tensors hold are saved for one. `eval()` does not switch grad mode off.",
        notes=breakdown(failed),
        fixes=[
            Fix(
                title=f"Evaluate without a graph: `with {_no_grad(found)}:` around {'the loop' if found.loops else 'it'}",
                safety="safe",
                detail="The values stay the same.",
                patch=_patch(found),
            )
        ],
        avoid=AVOID,
    )


def _collects(incident: Incident, failed: Allocation, found: Evaluation, saved: int, kept: Kept) -> Diagnosis:
    verb = "keep" if len(kept.names) > 1 else "keeps"
    failing = [] if incident.place is None else [incident.place.span(f"{asked(failed)} could not be had here", "context")]
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"{ran_out(failed)}: {kept.subject} {verb} the graph of every iteration, {size(saved)}",
        culprit=kept.culprit(),
        related=[*kept.related(), *failing],
        explanation=f"{size(saved)} of the {size(failed.held)} that tensors hold are saved for a backward call, and none begins at "
        f"{kept.subject}. A tensor with a grad_fn holds everything it was computed from.",
        notes=breakdown(failed),
        fixes=[
            kept.fix(),
            Fix(title=f"Compute it without a graph: `with {_no_grad(found)}:` around the loop", safety="safe", patch=_patch(found)),
        ],
        avoid=AVOID,
        confidence="likely",
    )


def _builds(incident: Incident, failed: Allocation, found: Evaluation, saved: int) -> Diagnosis:
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"{ran_out(failed)}: what is collected here keeps its graphs, {size(saved)}",
        culprit=found.span("keeps the results of all iterations with their graphs", "culprit"),
        explanation=f"{size(saved)} of the {size(failed.held)} that tensors held are saved for a backward call, and none begins at what is "
        "collected. A tensor with a grad_fn holds everything it was computed from.",
        notes=breakdown(failed),
        fixes=[Fix(title=f"Compute it without a graph: `with {_no_grad(found)}:` around it", safety="safe", patch=_patch(found))],
        avoid=AVOID,
        confidence="likely",
    )


def _no_grad(found: Evaluation) -> str:
    """`torch.no_grad()` as the file writes it."""
    return f"{spelt(found.program.source, 'torch.no_grad') or 'torch.no_grad'}()"


def _patch(found: Evaluation) -> str | None:
    """The diff that runs it without a graph."""
    source = found.program.source
    statement = source.statement(found.repeated)
    if spelt(source, "torch.no_grad") is None or statement is None or found.is_lazy:
        return None
    return wrapped(source, [statement], f"with {_no_grad(found)}:")


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="memory ran out, held by a graph that an evaluation records",
    recognise=recognise,
    priority=8,
)
