"""Where a non-finite loss is part of how it works: gradient scaling, line search."""

from __future__ import annotations

import gc
from typing import Any

import torch

from gradguard.analysis.incident import Incident
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import peek
from gradguard.instrumentation.tensor_refs import UncountedRef
from gradguard.monitors.grad_scaler import may_be_scaled
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.numerics import Numbers


def scaler_in_use(incident: Incident, numbers: Numbers) -> bool:
    """Whether a GradScaler is at work: one has scaled a loss in this run, or may have scaled this one before the guard was entered."""
    if any(map(_is_at_work, incident.notes[Ledger].scaling.scalers)):
        return True
    if not any(map(may_be_scaled, incident.roots)):
        return False
    known = None if numbers.scaler is None else numbers.scaler()
    if known is None:
        known = next((obj for obj in gc.get_objects() if issubclass(type(obj), torch.amp.GradScaler)), None)
        numbers.scaler = None if known is None else UncountedRef(known)
    return known is not None and _is_at_work(known)


def _is_at_work(scaler: Any) -> bool:
    """Whether a scaler is enabled, and its scale set by a first `scale(loss)`."""
    try:
        return bool(peek(scaler, "_enabled", False)) and peek(scaler, "_scale", None) is not None
    except internal_error():
        return False


def overflow_of_scaler(incident: Incident, numbers: Numbers, root: torch.Tensor) -> bool:
    """Whether a non-finite root is a GradScaler's business: only scaling made it so, or it is the first in a row."""
    if not scaler_in_use(incident, numbers):
        numbers.unscaled_bad = 0
        return False
    node = root.grad_fn
    unscaled = None
    if node is not None and type(node).__name__ == "MulBackward0" and node.next_functions and node.next_functions[0][0] is not None:
        from gradguard.analysis.graph.node_values import GraphValues

        unscaled = GraphValues([node], [tensor for _, tensor in incident.names.tensor_bindings()]).input(node, 0)
    if unscaled is None:
        if not bool(torch.isnan(root).any()):  # too large for the scale, which the scaler will halve
            return True
    elif bool(torch.isfinite(unscaled).all()):
        return True
    numbers.unscaled_bad += 1
    return numbers.unscaled_bad < 2


_LINE_SEARCH = 25  # points that LBFGS tries at most


def searching_line(incident: Incident, numbers: Numbers) -> bool:
    """Whether the loss is that of a point which LBFGS only tries: it backs off from points that are not finite."""
    for view in incident.frames:
        if view.code_name == "step" and not view.is_user:
            optimizer = view.locals.get("self")
            if isinstance(optimizer, torch.optim.Optimizer) and any(base.__name__ == "LBFGS" for base in type(optimizer).__mro__):
                numbers.tried += 1
                return numbers.tried <= _LINE_SEARCH
    numbers.tried = 0
    return False
