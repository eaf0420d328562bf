"""An activation that is the last op before the loss: its output is the prediction, and must be able to reach the targets."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradguard.analysis.graph.node_values import GraphValues
from gradguard.analysis.graph.recompute import node_kind
from gradguard.analysis.incident import Incident
from gradguard.core.diagnosis import Fix
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import named_children, parameters_in
from gradguard.rules.numerics.ranges import value_range

_VIEWS = {"View", "ReshapeAlias", "UnsafeView", "Squeeze", "Unsqueeze", "Alias", "Select", "Slice", "T", "Transpose", "Permute"}
_LOSSES = {"MseLoss", "SmoothL1Loss", "HuberLoss"}


def below_targets(values: GraphValues, node: Any) -> Fix | None:
    """The fix where a ReLU's output goes into a loss as it is, and targets of that loss lie below 0; None where it does not."""
    while True:
        users = values.users.get(node, [])
        if len(users) != 1:
            return None
        node = users[0]
        if node_kind(node) in _LOSSES:
            break
        if node_kind(node) not in _VIEWS:
            return None
    try:
        target = node._saved_target
    except internal_error():
        return None
    if not isinstance(target, torch.Tensor) or not target.numel() or float(target.detach().min()) >= 0:
        return None
    return Fix(
        title=f"take the ReLU off the output: the targets ({value_range(target.detach())}) go below 0, and what it gives does not",
        safety="manual",
        detail="the last layer of a regression has no activation, or one whose range is that of the targets",
    )


def last_activation(incident: Incident, leaves: list[torch.Tensor]) -> str | None:
    """The path of the ReLU that a `Sequential` ends with, if only one such model has parameters among `leaves`."""
    cut_off = {id(leaf) for leaf in leaves}
    found = []
    for variable, root in incident.names.modules:
        children = list(named_children(root))
        ends_in_relu = isinstance(root, nn.Sequential) and children and isinstance(children[-1][1], nn.ReLU)
        if ends_in_relu and any(id(parameter) in cut_off for parameter in parameters_in(root)):
            found.append(f"{variable}.{children[-1][0]}" if variable else children[-1][0])
    return found[0] if len(set(found)) == 1 else None
