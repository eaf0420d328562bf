"""Accelerate's accelerator, and its wrapped optimizers, whose step() and zero_grad() do something only once an accumulation."""

from __future__ import annotations

import ast
from typing import Any

from gradguard.analysis.graph.walk import leaves
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.optimizer_contents import parameters_of
from gradguard.analysis.places.source import ResolvedSite
from gradguard.core.diagnosis import Fix
from gradguard.core.safe_read import peek
from gradguard.fixes.diff import unified
from gradguard.fixes.edits import indent_of


def wrapper_of(incident: Incident, optimizer: Any) -> str | None:
    """What the wrapper of an optimizer is called; None where there is none around the incident."""
    if optimizer is None:
        return None
    return next(
        (
            name
            for name, value in incident.names.bindings
            if type(value).__name__ == "AcceleratedOptimizer" and peek(value, "optimizer", None) is optimizer
        ),
        None,
    )


def accelerator_name(incident: Incident) -> str | None:
    """What the accelerator is called around the incident."""
    return next((name for name, value in incident.names.bindings if type(value).__name__ == "Accelerator"), None)


def trains_prepared(incident: Incident) -> bool:
    """Whether accelerate has prepared a module or an optimizer that the loss trains: its state outlives the training that set it."""
    found = leaves(incident.root_nodes)
    roots = (state.root for leaf in found if (state := incident.names.state(leaf)) is not None)
    if any(peek(module, "_is_accelerate_prepared", False) is True for module in roots):
        return True
    held = {id(leaf) for leaf in found}
    return any(
        type(optimizer).__name__ == "AcceleratedOptimizer" and any(id(p) in held for p in parameters_of(optimizer))
        for optimizer in incident.names.optimizers()
    )


def clears_behind_the_step(wrapper: str, zero: ResolvedSite | None, step: ResolvedSite | None) -> Fix:
    """The wrapper's own zero_grad(), behind its step: it waits for the end of the accumulation, a module's does not."""
    call = f"{wrapper}.zero_grad()"
    return Fix(
        title=f"Clear with `{call}` behind `{wrapper}.step()`: it waits for the end of the accumulation, as the step does",
        safety="unsafe",
        patch=_moved(zero, step, call),
    )


def _moved(zero: ResolvedSite | None, step: ResolvedSite | None, call: str) -> str | None:
    """The one statement taken out, and the call put behind the step's statement of the same block."""
    if zero is None or step is None or zero.source is None or step.source is not zero.source:
        return None
    old, new, source = zero.statement, step.statement, zero.source
    plain = isinstance(old, ast.Expr) and isinstance(new, ast.Expr) and old.value is zero.node and new.value is step.node
    if old is None or new is None or not plain or source.parents.get(old) is not source.parents.get(new):
        return None
    alone = all(source.lines[node.lineno - 1].strip() == source.flat(node) for node in (old, new))
    if not alone or old.end_lineno != old.lineno or new.end_lineno != new.lineno:
        return None
    lines = list(source.lines)
    below = indent_of(source, new.lineno) + call + "\n"
    lines[new.lineno - 1 : new.lineno] = [lines[new.lineno - 1], below]
    del lines[old.lineno - 1 + (old.lineno > new.lineno)]
    return unified(source, lines)
