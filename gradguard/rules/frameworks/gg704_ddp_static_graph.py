"""# GG704 ddp-static-graph

## What it is
A DistributedDataParallel module was made with `static_graph=True`, and the set of parameters that a step uses has changed.

## Why it is wrong
With `static_graph=True` DDP learns in the first step which parameters get a gradient and how often, and relies on it from
then on. A branch that joins later, or is left out later, breaks that promise.

## Example
    def forward(self, x):
        h = self.coarse(x)
        if not self.warming_up:
            h = h + self.fine(h)       # joins the graph after some steps
        return h

    ddp = DDP(net, static_graph=True)

## Use instead
    ddp = DDP(net, find_unused_parameters=True)

## Fix safety
Manual: gradients are the same; each step walks the graph once more.

## When it speaks, what silences it
When PyTorch raises.
"""

from __future__ import annotations

from typing import Any

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import short_list
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.safe_read import parameters_in
from gradguard.fixes.edits import respelt
from gradguard.rules.base import Rule
from gradguard.rules.frameworks import ddp as shared

CODE, NAME = "GG704", "ddp-static-graph"


def recognise(incident: Incident) -> Diagnosis | None:
    """Which submodule has joined the graph or left it, and what decides that."""
    ddp = shared.replica(incident)
    if ddp is None:
        return None
    uses = _changed(incident, ddp)
    paths = list(dict.fromkeys(use.path for use in uses))
    made = shared.made(incident, ddp, "promises that every step uses the same parameters (`static_graph=True`)")
    what = short_list(paths, 3) if paths else "the set of parameters that a step uses"
    culprit: SourceSpan | None
    related: list[SourceSpan | None]
    joined = "joins the graph" if incident.where == "backward" else "leaves the graph"
    if uses:
        use = uses[0]
        headline = f"{what} {joined} after the first step, although `static_graph=True` promises DDP that nothing changes: "
        headline += f"it runs only if `{use.condition_text}`"
        culprit = use.span(f"runs only if `{use.condition_text}`")
        related = [shared.deciding(incident, use), made]
    else:
        headline = "a step uses other parameters than the first one, or uses them more or less often, although `static_graph=True` "
        headline += "promises DDP that nothing changes"
        culprit, related = None if made is None else made.model_copy(update={"role": "culprit"}), []
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=headline,
        culprit=culprit,
        related=[span for span in related if span is not None],
        explanation="With `static_graph=True` DDP learns in the first step which parameters get a gradient and how often, "
        "and relies on it from then on.",
        fixes=[
            Fix(
                title="Make the DistributedDataParallel module with `find_unused_parameters=True` in place of `static_graph=True`",
                safety="safe",
                detail="It looks in each step which parameters take part.",
                patch=respelt(made, "static_graph=True", "find_unused_parameters=True"),
            ),
            Fix(
                title=f"Run {what} in every step, and multiply its part by zero until it counts"
                if paths
                else "Use the same layers as often in every step",
                safety="unsafe",
            ),
        ],
        avoid=["wrapping the module anew when the phase changes while keeping the old wrapper alive: both would reduce the same gradients"],
    )


def _changed(incident: Incident, ddp: Any) -> list[shared.Use]:
    """Conditional uses of submodules that are in this step's graph (of those that are not, where nothing ran backward yet)."""
    uses = shared.conditional_uses(ddp.module)
    present = _parameters_in(incident.root_nodes)
    if incident.where != "backward" or not present:
        return uses if len({use.path for use in uses}) == 1 else []

    def inside(use: shared.Use) -> bool:
        own = [id(p) for p in parameters_in(ddp.module.get_submodule(use.path)) if p.requires_grad]
        return any(each in present for each in own)

    now = [use for use in uses if inside(use)]
    states = [optimizer.state for optimizer in incident.names.optimizers()]
    stepped = {id(p) for state in states for p in state}

    def fresh(use: shared.Use) -> bool:
        return not any(id(p) in stepped for p in parameters_in(ddp.module.get_submodule(use.path)))

    return [use for use in now if fresh(use)] or now


def _parameters_in(roots: list[Any]) -> set[int]:
    found: set[int] = set()
    seen: set[Any] = set()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        waiting.extend(following for following, _ in node.next_functions)
    return found


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="static_graph=True, and the graph changes",
    recognise=recognise,
    messages=("training graph has changed in this iteration",),
    priority=50,
)
