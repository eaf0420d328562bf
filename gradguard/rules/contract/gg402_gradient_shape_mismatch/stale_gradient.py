"""Parameters whose `.data` was given another shape while `.grad` has the old one, to which backward cannot add. Part of GG402."""

from __future__ import annotations

import re

import torch

from gradguard.analysis.graph.walk import is_accumulate, nodes_from
from gradguard.analysis.incident import Incident
from gradguard.core.diagnosis import Diagnosis, Fix, TensorFacts
from gradguard.rules.contract.gg402_gradient_shape_mismatch.reshaped_parameter import where_reshaped

MESSAGES = ("must match the size of tensor b", "doesn't match the broadcast shape")
_SIZES = re.compile(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)")
_SHAPE = re.compile(r"output with shape \[([^\]]*)\] doesn't match the broadcast shape")


def of_another_shape(incident: Incident) -> Diagnosis | None:
    """The leaf to whose `.grad` the gradient of its present shape could not be added."""
    if incident.where != "backward" or incident.place is None or incident.all_frames[0].code_name != "_engine_run_backward":
        return None  # or in a hook, or in a custom Function's backward
    leaves = [node.variable for node in nodes_from(incident.root_nodes) if is_accumulate(node)]
    stale = [leaf for leaf in leaves if type(leaf) in (torch.Tensor, torch.nn.Parameter) and _cannot_be_added(leaf, incident.message)]
    if not stale:
        return None
    leaf = stale[0]
    assert leaf.grad is not None
    old, new = list(leaf.grad.shape), list(leaf.shape)
    name = incident.names.leaf(leaf)
    shown = f"`{name}`" if name else "a leaf"
    culprit, others, _ = where_reshaped(incident, leaf, name)
    return Diagnosis(
        code="GG402",
        name="gradient-shape-mismatch",
        headline=f"{shown if name else 'A leaf'} was given another shape through `.data`: its `.grad` still has {old}, the new gradient is"
        f" {new}.",
        culprit=None if culprit is None else culprit.statement_span(f"`.data` of {shown} gets another shape here: {new}", "culprit"),
        related=[
            *(place.statement_span("this may have done it: it gives a `.data` another tensor") for place in others),
            incident.place.span("adds to the gradient of the old shape", "backward"),
        ],
        tensors=[TensorFacts(name=name, kind="parameter" if isinstance(leaf, torch.nn.Parameter) else "tensor", shape=new)],
        explanation="backward() adds to `.grad`. Assigning to `.data` puts another tensor into the same parameter and leaves its `.grad` as"
        " it is, so the gradient of an earlier backward() is there in the old shape.",
        notes=[f"the same holds for {len(stale) - 1} other parameters"] if len(stale) > 1 else [],
        fixes=[
            Fix(
                title=f"clear the gradient with the shape: `{name or 'parameter'}.grad = None` after the assignment",
                safety="unsafe",
                detail="An optimizer with momentum or averages keeps a state of the old shape, too: make a new one then.",
            )
        ],
        confidence="certain" if culprit is not None else "likely",
    )


def _cannot_be_added(leaf: torch.Tensor, message: str) -> bool:
    """Whether adding a gradient of the leaf's shape to its `.grad` raises this message."""
    gradient = leaf.grad
    if gradient is None or gradient.shape == leaf.shape:
        return False
    if (shape := _SHAPE.search(message)) is not None:
        return [int(n) for n in re.findall(r"\d+", shape[1])] == list(gradient.shape)
    sizes = _SIZES.search(message)
    pairs = zip(reversed(gradient.shape), reversed(leaf.shape), strict=False)
    return sizes is not None and (int(sizes[1]), int(sizes[2])) in [(a, b) for a, b in pairs if a != b]
