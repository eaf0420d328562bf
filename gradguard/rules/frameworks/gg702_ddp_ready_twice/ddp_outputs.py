"""What a DDP module's forward returns, where DDP finds no tensor in it: with `find_unused_parameters=True` every parameter then counts
as unused. Part of GG702."""

from __future__ import annotations

import ast
from typing import Any, NamedTuple

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import resolve, span_of
from gradguard.analysis.program.expressions import inside, last_part
from gradguard.analysis.program.syntax import FUNCTIONS
from gradguard.core.diagnosis import SourceSpan
from gradguard.core.safe_read import attributes, peek
from gradguard.rules.spans import class_node
from gradguard.torch_compat.private_api import ddp_finds_tensors

_PLAIN = (torch.Tensor, nn.Module, torch.optim.Optimizer, str, bytes, int, float, list, tuple, dict, set, type)


class Hidden(NamedTuple):
    """An object that forward returns with tensors in it, where DDP does not look.

    Attributes:
        name: the variable it is in.
        kind: its class.
        returned: the statement of forward that returns it, if there is just one such.
    """

    name: str
    kind: str
    returned: SourceSpan | None


def hidden(incident: Incident, ddp: Any) -> Hidden | None:
    """The object around the failing call that holds tensors with a graph and that DDP's search passes over."""
    if not peek(ddp, "find_unused_parameters", False):
        return None
    kinds = {type(module) for module in (ddp, ddp.module)}
    for view in incident.user_frames[:6]:
        for name, value in view.locals.items():
            if isinstance(value, _PLAIN) or type(value) in kinds or not _holds_graph(value) or ddp_finds_tensors(value):
                continue
            if not _comes_from(view, name, ddp):
                continue
            return Hidden(name, type(value).__name__, _returned(type(ddp.module), type(value).__name__))
    return None


def _holds_graph(value: Any) -> bool:
    return any(isinstance(item, torch.Tensor) and item.grad_fn is not None for item in attributes(value).values())


def _comes_from(view: Any, name: str, ddp: Any) -> bool:
    """Whether the variable gets its value from a call of the DDP module in this function."""
    place = resolve(view.site)
    function = None if place is None else place.enclosing_function or (place.source and place.source.tree)
    for node in inside(function if isinstance(function, ast.AST) else None, ast.Assign):
        if any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
            call = node.value
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and view.locals.get(call.func.id) is ddp:
                return True
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
                owner = view.locals.get(call.func.value.id)
                if peek(owner, call.func.attr, None) is ddp:
                    return True
    return False


def _returned(module: type, kind: str) -> SourceSpan | None:
    found = class_node(module)
    if found is None:
        return None
    source, cls = found
    returns = [
        node
        for method in cls.body
        if isinstance(method, FUNCTIONS) and getattr(method, "name", "") == "forward"
        for node in inside(method, ast.Return)
        if isinstance(node.value, ast.Call) and last_part(node.value) == kind
    ]
    if len(returns) != 1:
        return None
    return span_of(source.filename, returns[0], label=f"DDP finds no tensor in what forward returns: a plain `{kind}`", role="culprit")
