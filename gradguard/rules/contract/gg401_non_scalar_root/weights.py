"""The weights of several outputs: what the argument is called, when the derivative of each element is wanted, and how it is asked for."""

from __future__ import annotations

import ast

import torch

from gradguard.analysis.graph.walk import walk
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, dotted
from gradguard.analysis.program.expressions import argument
from gradguard.analysis.program.scopes import frame_scopes
from gradguard.core.diagnosis import Fix
from gradguard.core.safe_read import UNKNOWN
from gradguard.fixes.edits import appended, edit_of, patched

_LOSSES = ("CrossEntropy", "NllLoss", "MseLoss", "L1Loss", "HuberLoss", "KlDiv", "MarginLoss", "CtcLoss")


def weights_argument(incident: Incident) -> str:
    """The argument by which this call takes the weights."""
    if incident.where == "grad":
        return "grad_outputs"
    call = None if incident.place is None else incident.place.call
    return "grad_tensors" if call is not None and (dotted(call.func) or "").endswith("autograd.backward") else "gradient"


def each_elements_own(incident: Incident, root: torch.Tensor) -> bool:
    """Whether the derivative of each output with respect to its own input is asked for: rows against rows, and no loss on the way.

    Parameters and fast weights are asked for with a loss, which is to be reduced; a batch of points is asked for with a field's
    values at these points.
    """
    if incident.where != "grad" or not incident.inputs or not root.dim() or root.is_complex():
        return False
    for wanted in incident.inputs:
        if isinstance(wanted, torch.nn.Parameter) or not wanted.dim() or wanted.shape[0] != root.shape[0]:
            return False
    return not any(name in node.name() for node, _ in walk(incident.root_nodes, limit=40) for name in _LOSSES)


def fixes_for_each(incident: Incident, root: torch.Tensor, name: str) -> list[Fix]:
    """How the derivative of each element is asked for."""
    return [
        Fix(
            title=f"pass the weight of each element: `grad_outputs=torch.ones_like({name})`",
            safety="unsafe",
            patch=_patch(incident.place, incident),
            detail="Ones give the gradient of the sum: each element's own derivative, where no row of the input has a say in the "
            "element of another row.",
        ),
        Fix(title=f"start from `{name}.sum()`: the same derivatives", safety="unsafe"),
    ]


def _patch(place: ResolvedSite | None, incident: Incident) -> str | None:
    """`grad_outputs=` put behind the inputs of the call."""
    call = None if place is None else place.call
    if call is None or place is None or place.source is None or len(call.args) > 3 or any(word.arg is None for word in call.keywords):
        return None
    output, last, empty = argument(call, "outputs", 0), argument(call, "inputs", 1), argument(call, "grad_outputs", 2)
    if output is None or last is None or isinstance(output, (ast.Tuple, ast.List)):
        return None
    scopes = frame_scopes(incident.user_frames[:1])
    if not scopes or scopes[0].evaluate(ast.Name(id="torch", ctx=ast.Load())) in (UNKNOWN, None):
        return None
    ones = f"torch.ones_like({place.source.segment(output)})"
    if empty is not None:
        return patched(place.source, edit_of(empty, ones))
    return patched(place.source, appended(last, f", grad_outputs={ones}"))
