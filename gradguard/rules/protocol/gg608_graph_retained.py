"""# GG608 graph-retained

## What it is
The autograd graphs of old steps are still alive, and there are more of them with every step: something keeps tensors of
theirs with their `grad_fn`.

## Why it is wrong
A tensor with a `grad_fn` holds the whole graph it came from. Memory grows until it runs out, each step takes a little longer,
and a later backward through the old graph fails.

## Example
    self.loss_average = 0.9 * self.loss_average + 0.1 * loss     # holds the graph of every iteration
    losses.append(loss)

## Use instead
    self.loss_average = 0.9 * self.loss_average + 0.1 * loss.detach()
    losses.append(loss.item())

## Fix safety
Safe where the value is only looked at (logging, running statistics): values stay the same.

## When it speaks, what silences it
When five or more graphs that are at least 16 steps old live, over a span of 48 steps or more, and their number grows between
two looks (every eighth to 64th backward). And where a variable that is part of no loss, such as a running average of parameters, has
a graph that has grown by a node or more in each step at two surveys in a row (steps 3, 12, 24, 60, 150 ...), and reaches back behind
the survey before. Graphs kept within a step or for a window of steps are silent.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field

from gradguard.analysis.graph.walk import nodes_from, root_nodes
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.alive_tensors import Alive
from gradguard.core.diagnosis import Diagnosis
from gradguard.monitors.retained_graphs import KEY, GraphsRetained, Tag
from gradguard.monitors.surveys import KeptGraphsDue
from gradguard.rules.base import Rule
from gradguard.rules.keepers import Kept, keepers
from gradguard.torch_compat.private_api import node_sequence, sequence_number

CODE, NAME = "GG608", "graph-retained"


class Options(BaseModel):
    """What can be set under `rules: {GG608: ...}`."""

    model_config = ConfigDict(extra="forbid")

    age: int = Field(default=16, ge=2, le=1_000, description="steps after which a graph that still lives counts as kept")
    graphs: int = Field(default=5, ge=3, le=24, description="so many of them must live, over three times that many steps, before it speaks")


_NODES = 30_000
_NAMES, _LOOKS = 512, 2
_TENSORS = 200


class _Size(NamedTuple):
    """The graph of a variable at a survey.

    Attributes:
        sequence: the number that the next node would have had.
        grown: at how many surveys in a row it had grown with each step.
    """

    steps: int
    nodes: int
    sequence: int
    grown: int


class Grown(NamedTuple):
    """Tensors whose graphs grow with each step.

    Attributes:
        before, now: nodes of the first one's at the survey before, and now.
        steps: between the two.
    """

    tensors: list[torch.Tensor]
    before: int
    now: int
    steps: int


def recognise(incident: Incident) -> Diagnosis | None:
    """What holds the old graphs, and the line that puts it there."""
    finding: GraphsRetained | KeptGraphsDue = incident.finding
    if isinstance(finding, KeptGraphsDue):
        grown = _grown(incident)
        found = [] if grown is None else keepers(incident, [(tensor, set[int]()) for tensor in grown.tensors], [id(grown.tensors)])
        history = (
            "" if grown is None else f"Their graph has grown from {grown.before} to {grown.now} nodes in {grown.steps} steps. It hangs"
        )
    else:
        found = keepers(incident, _reaching_back(finding.tags))
        history = (
            f"Graphs of steps back to step {finding.since} are still alive at step {finding.step}, {finding.count} of those that "
            "were marked, and more at every look. They hang"
        )
    if not found:
        return None
    kept = Kept(incident, found)
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"{kept.subject} {'keep' if len(kept.names) > 1 else 'keeps'} the graphs of old steps alive: memory grows with every step",
        culprit=kept.culprit(),
        related=kept.related(),
        explanation=(f"{history} on {kept.subject}: a tensor with a grad_fn holds everything it was computed from."),
        fixes=[kept.fix()],
        avoid=["`gc.collect()` or `torch.cuda.empty_cache()`: the memory is in use, not fragmented"],
    )


def _reaching_back(old: Collection[Tag]) -> list[tuple[torch.Tensor, set[int]]]:
    """Tensors that reach old graphs, and the backward counts of those."""
    reached: list[tuple[torch.Tensor, set[int]]] = []
    for tensor in Alive().tensors:
        tags = _old_tags(tensor, old)
        if tags:
            reached.append((tensor, tags))
        if len(reached) >= _TENSORS:
            break
    return reached


class _Sizes(dict[str, _Size]):
    """Of the graphs behind variables at the survey before."""


def _grown(incident: Incident) -> Grown | None:
    """The variables that are part of no loss and whose graphs have grown with each step, at two surveys in a row.

    A graph that grows within a step, such as a longer and longer rollout, has none of the nodes of the survey before.
    """
    sizes = incident.notes[_Sizes]
    now = _Sizes()
    steps, sequence = incident.finding.book.steps, sequence_number()
    found: dict[str, torch.Tensor] = {}
    for name, tensor in islice(incident.names.tensor_bindings(), _NAMES):
        nodes = _nodes(tensor)
        if not nodes or any(KEY in node.metadata for node in nodes):
            continue
        before = sizes.get(name)
        oldest = min(node_sequence(node) for node in nodes)
        grows = before is not None and oldest < before.sequence and len(nodes) - before.nodes >= steps - before.steps > 0
        now[name] = _Size(steps, len(nodes), sequence, 1 + (before.grown if grows and before is not None else 0) if grows else 0)
        if now[name].grown == _LOOKS:
            found[name] = tensor
    incident.notes.put(now)
    if not found:
        return None
    name = next(iter(found))
    return Grown(list(found.values()), sizes[name].nodes, now[name].nodes, steps - sizes[name].steps)


def _nodes(tensor: torch.Tensor) -> list[Any]:
    """The nodes of a tensor's graph, without the leaves'; none of a graph that is too large."""
    found = nodes_from(root_nodes([tensor]), _NODES)
    return [node for node in found if node.next_functions] if len(found) < _NODES else []


def _old_tags(tensor: torch.Tensor, old: Collection[Tag]) -> set[int]:
    """Backward counts of the old graphs that a tensor reaches."""
    tags = (node.metadata.get(KEY) for node in nodes_from(root_nodes([tensor]), _NODES) if node.next_functions)
    return {tag.backward for tag in tags if isinstance(tag, Tag) and tag in old}


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="graphs of old steps are kept alive and pile up",
    recognise=recognise,
    moments=frozenset({"finding"}),
    severity="warning",
)
