"""Writes to views that a custom Function has given out, or that the Function of full backward hooks has: which node that was."""

from __future__ import annotations

from typing import Any

import torch

from gradguard.analysis.incident import Incident
from gradguard.core.safe_read import UNKNOWN
from gradguard.rules.contract.operands import scope_at
from gradguard.torch_compat.private_api import grad_fn_of

MESSAGE = "this view was created inside a custom function"
_HOOKS = "BackwardHookFunctionBackward"
_MOST = 64  # views of views


def maker(incident: Incident) -> Any:
    """The Function's node that the written tensor comes from, through views alone; None where it is not known.

    PyTorch names the node of the last view (`Output 0 of Select`), which says nothing about the Function.
    """
    tensor = written(incident)
    return None if tensor is None else maker_of(tensor)


def maker_of(tensor: torch.Tensor) -> Any:
    """The Function's node that a tensor comes from, by nodes that have one source."""
    node = grad_fn_of(tensor)
    for _ in range(_MOST):
        if node is None or hasattr(type(node), "_forward_cls"):
            return node
        sources = [source for source, _ in node.next_functions]
        node = sources[0] if len(sources) == 1 else None
    return None


def of_hooks(node: Any) -> bool:
    """Whether it is the Function that full backward hooks pass a module's tensors through."""
    return node is not None and node.name() == _HOOKS


def written(incident: Incident) -> torch.Tensor | None:
    """The tensor that the failing call writes: its first argument, or the variable on the line."""
    if incident.args:
        value = incident.args[0]
    else:
        scope = None if incident.place is None else scope_at(incident, incident.place)
        node = None if incident.place is None else incident.place._receiver_node
        value = UNKNOWN if scope is None or node is None else scope.evaluate(node)
    return value if isinstance(value, torch.Tensor) else None
