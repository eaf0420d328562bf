"""# GG706 ddp-unsynchronized

## What it is
The replicas of a DistributedDataParallel module are no longer equal: parameters were replaced, cast or moved after the module
was wrapped, or one rank does something to gradients or weights that the others do not.

## Why it is wrong
DDP makes the replicas equal once, when the module is wrapped, and keeps them equal by giving every rank the same gradients.
It does not look at the weights again: ranks that differ once stay different, and average gradients of different models.

## Example
    ddp = DDP(net)
    if rank == 0:
        clip_grad_norm_(ddp.parameters(), 1.0)     # the other ranks step with unclipped gradients

## Use instead
    clip_grad_norm_(ddp.parameters(), 1.0)         # on every rank

## Fix safety
Unsafe: what is computed changes, which is the purpose.

## When it speaks, what silences it
At the first steps, where DDP's hooks were lost by a cast or move, and nothing was exchanged between the ranks from the start of
`backward()` to the optimizer's step. Else at the second comparison of fingerprints that differ (at an optimizer's steps 2, 3, 4,
5, 8, 16, 32, 64 and every 100th). Programs that bring the ranks together themselves, and modules with a communication hook, are
silent.
"""

from __future__ import annotations

import ast
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import short_list
from gradguard.analysis.places.source import module_ast, resolve, segment, span_of
from gradguard.analysis.program.expressions import calls_inside, inside
from gradguard.analysis.program.user_calls import user_files
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.monitors import replica_drift
from gradguard.probes import replicas
from gradguard.probes.replicas import Drift
from gradguard.rules.base import Rule
from gradguard.rules.frameworks import averaging
from gradguard.rules.frameworks import ddp as shared
from gradguard.rules.frameworks.gg706_ddp_unsynchronized import thaw

CODE, NAME = "GG706", "ddp-unsynchronized"


class Options(BaseModel):
    """What can be set under `rules: {GG706: ...}`."""

    model_config = ConfigDict(extra="forbid")

    every: int = Field(default=100, ge=1, le=100_000, description="steps between two comparisons of the replicas, after the first ones")
    tolerance: float = Field(default=1e-5, ge=0, lt=1, description="of the mean magnitude: replicas nearer to each other count as equal")


_MAIN = ("is_main_process", "is_master", "is_main", "main_process", "master")
_CHANGES = (
    "clip_grad_norm_", "clip_grad_value_", "step", "zero_grad", "load_state_dict", "backward", "copy_", "mul_", "add_", "div_", "fill_",
    "zero_", "normal_", "uniform_", "clamp_",
)  # fmt: skip


def recognise(incident: Incident) -> Diagnosis | None:
    """What the replicas differ in, and what made them."""
    drift = incident.finding
    if not isinstance(drift, Drift) or drift.told or averaging.averaged_by_hand(incident):
        return None
    ddp, name = drift.ddp, shared.name_of(incident, drift.ddp)
    then = replicas.described(ddp)
    now = [(path, p) for path, p in replicas.parameters(ddp) if p.requires_grad]
    new = [path for path, p in now if id(p) not in then.identities]
    cast = [path for path, p in now if path in then.names and (p.dtype, p.device) != then.dtypes[then.names.index(path)]]
    culprit: SourceSpan | None
    what = "gradients" if drift.gradients else "parameters"
    thawed = [path for path, p in now if path in new and thaw.was_frozen(ddp, p)]
    if new and len(thawed) == len(new):
        blamed = short_list(shared.blamed(ddp.module, set(new)), 3)
        culprit = thaw.place(incident, [p for path, p in now if path in new])
        headline = f"{blamed} was frozen when `{name}` was wrapped, and is trained now: DDP does not average its gradients, and the ranks "
        headline += "drift apart"
        why = "At its construction DDP puts hooks on the parameters that require grad then. Those that are unfrozen later have none, and "
        why += "each rank trains its own."
        title = "Wrap the module in DDP again after unfreezing (and keep the optimizer), or unfreeze before wrapping"
        fix = Fix(title=title, safety="unsafe", detail="Parameters frozen at times can be left trainable, with a learning rate of 0.")
    elif new:
        blamed = short_list(shared.blamed(ddp.module, set(new)), 3)
        culprit = _assignment(incident, ddp, new)
        headline = f"{blamed} came into `{name}` after it was wrapped: DDP does not average its gradients, and the ranks drift apart"
        why = "DDP notes the parameters at its construction. Those that are put in later have no hook, and each rank trains its own."
        fix = Fix(title="Change the module first, then wrap it", safety="unsafe")
    elif drift.unhooked or (cast and drift.gradients):
        place = resolve(then.cast)
        culprit = None if place is None else place.span("casts or moves parameters that DDP has hooks on", "culprit")
        headline = f"`{name}` was cast or moved after it was wrapped: DDP's hooks are lost, and the ranks' models drift apart"
        why = (
            "DDP's hooks, which average the gradients, are on the AccumulateGrad nodes that the parameters had when it was made. A change "
        )
        why += "of dtype or device gives a parameter a new node without a hook; casting back does not restore the old one."
        fix = Fix(title="Cast or move the module first, then wrap it", safety="unsafe")
    elif not drift.compared:
        return None
    else:
        found = _on_one_rank(incident)
        culprit = None
        if drift.rates is not None and not drift.gradients:
            ours, theirs = ("/".join(f"{rate:g}" for rate in rates) for rates in drift.rates)
            headline = f"the ranks step with different learning rates, {ours} on rank {drift.rank} and {theirs} on rank {drift.other}: "
            headline += f"their copies of `{name}` drift apart"
        elif len(found) == 1:
            file, node, test = found[0]
            condition = segment(file, test) or ast.unparse(test)
            culprit = span_of(file, node, label=f"happens only where `{condition}`", role="culprit")
            done = ast.unparse(node).splitlines()[0]
            headline = f"the ranks' models drift apart: `{done}` happens only where `{condition}`"
        else:
            headline = f"the ranks' copies of `{name}` are no longer equal: their {what} differ at the step"
        why = "DDP makes the copies equal once, when the module is wrapped; "
        why += "from then on they are equal only as long as every rank does the same."
        fix = Fix(title="Do on every rank what changes gradients or weights, or before the module is wrapped", safety="unsafe")
        if drift.rates is not None and not drift.gradients:
            fix = Fix(title="Give the optimizer the same learning rate on every rank", safety="unsafe")
        elif not found:  # every rank may have done the same
            fix = Fix(
                title=f"Compute the loss through `{name}(...)` alone, and cast, move or change the module before it is wrapped",
                safety="manual",
                detail=f"A call of the module inside `{name}`, or a cast after it was made, leaves gradients that are not averaged, also"
                " where every rank does it. What only some ranks do to gradients or weights has the same effect.",
            )
    made = shared.made(incident, ddp, "made the copies equal, once")
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=headline,
        culprit=culprit,
        related=[made] if made is not None else [],
        tensors=shared.facts(ddp, new or drift.names),
        explanation=f"{why} What is saved in the end is the model of one rank.",
        notes=[drift.evidence],
        fixes=[fix],
        confidence="certain" if culprit is not None else "likely",
    )


def _assignment(incident: Incident, ddp: Any, new: list[str]) -> SourceSpan | None:
    """The one assignment, outside of constructors, to an attribute on the way to the new parameters."""
    attributes = {part for path in new for part in path.split(".")}
    found = shared.written_later(user_files(incident), attributes, "puts in parameters that DDP does not know", "culprit")
    return found[0] if len(found) == 1 else None


def _on_one_rank(incident: Incident) -> list[tuple[str, ast.stmt, ast.expr]]:
    """Statements that change gradients, weights or the optimizer, under a condition that differs between ranks."""
    found = []
    for file in user_files(incident):
        tree = module_ast(file)
        for node in (node for node in inside(tree, ast.If) if _by_rank(node.test)):
            found += [(file, each, node.test) for each in [*node.body, *node.orelse] if any(calls_inside(each, *_CHANGES))]
    return found


def _by_rank(test: ast.expr) -> bool:
    words = [item.attr for item in inside(test, ast.Attribute)]
    words += [item.id for item in inside(test, ast.Name)]
    return any("rank" in word.lower() or word.lower() in _MAIN for word in words)


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="the replicas of a DistributedDataParallel module have drifted apart",
    recognise=recognise,
    moments=frozenset({"before_backward", "after_backward", "before_step"}),
    severity="warning",
    screen=replica_drift.screen,
    idle=replica_drift.idle,
)
