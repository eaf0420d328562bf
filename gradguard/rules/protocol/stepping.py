"""The optimizer whose step raised."""

from __future__ import annotations

from typing import Any

import torch

from gradguard.analysis.incident import Incident


def stepping(incident: Incident) -> Any:
    """The optimizer in whose `step` (or a function of torch's that it called) the error came up."""
    for view in incident.frames:
        owner = view.locals.get("self")
        if owner is not None and torch.optim.Optimizer in type.mro(type(owner)):
            return owner
        if view.is_user:
            return None
    return None
