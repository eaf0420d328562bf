"""An optimizer that accelerate was not given: it steps in the middle of an accumulation. Part of GG752."""

from __future__ import annotations

import ast
import sys
from typing import Any

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.optimizer_contents import parameters_of
from gradguard.analysis.places.source import dotted, resolve, span_of
from gradguard.analysis.program.user_calls import calls
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.notes import Notes
from gradguard.instrumentation.tensor_refs import UncountedRef
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.rules import wording
from gradguard.rules.accelerated import accelerator_name

_TIMES = 2  # one step in the middle could be a loop that ends early


class _Midway(dict[int, tuple[Any, int]]):
    """How often an optimizer has stepped in the middle, with a reference to it, by its id."""


def screen(notes: Notes, optimizer: Any) -> bool:
    """Whether this optimizer has stepped in the middle of accumulations now; a prepared one does not."""
    state = getattr(getattr(sys.modules.get("accelerate.state"), "GradientState", None), "_shared_state", None) or {}
    if state.get("sync_gradients", True) or optimizer is None:
        return False
    seen = notes[_Midway]
    known, count = seen.get(id(optimizer), (None, 0))
    count = count + 1 if known is not None and known() is optimizer else 1
    seen[id(optimizer)] = UncountedRef(optimizer), count
    return bool(count == _TIMES)


def recognise(incident: Incident, code: str, name: str, steps: int) -> Diagnosis | None:
    """The step, and the `prepare()` that was not given the optimizer."""
    optimizer = incident.optimizer
    accelerator = accelerator_name(incident)
    call = incident.journal.backwards[-1] if incident.journal.backwards else None
    backward = None if call is None else resolve(call.site)
    if optimizer is None or backward is None or accelerator is None:
        return None
    if backward.receiver is None or backward.receiver != accelerator or not _filled(optimizer):
        return None
    book = incident.notes[Ledger].books.get(id(optimizer))
    own = incident.names.optimizer_variable(optimizer) or "optimizer"
    place = incident.place
    prepared = _prepare(incident, accelerator, own)
    at = None if place is None else place.span("steps after every micro-batch", "culprit" if prepared is None else "context")
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"`{own}` was not prepared by `{accelerator}`: it steps in the middle of accumulations of {steps} micro-batches",
        culprit=prepared or at,
        related=wording.spans(
            None if prepared is None else at,
            backward.span(f"divides the loss by {steps}", "backward"),
            None if book is None else wording.span(book.made, f"`{own}` is made here", "declared"),
        ),
        explanation=f"Only optimizers that `{accelerator}.prepare()` has wrapped wait for the last micro-batch with `step()` and "
        "`zero_grad()`. This one steps each time, on the gradient of one micro-batch, "
        f"which `{accelerator}.backward` has divided by {steps}.",
        fixes=[Fix(title=f"Give `{own}` to `{accelerator}.prepare(...)` too, and use what it gives back", safety="unsafe")],
        confidence="likely",
    )


def _filled(optimizer: Any) -> bool:
    """Whether the optimizer's parameters have gradients at all: else the step does nothing."""
    return any(p.grad is not None for p in parameters_of(optimizer))


def _prepare(incident: Incident, accelerator: str, optimizer: str) -> SourceSpan | None:
    """The one call of prepare(), if the optimizer is not among what it is given."""
    found = [
        (file, call)
        for file, call in calls(incident, "prepare")
        if isinstance(call.func, ast.Attribute) and (dotted(call.func.value) or "").rpartition(".")[2] == accelerator.rpartition(".")[2]
    ]
    if len(found) != 1:
        return None
    file, call = found[0]
    given = {(dotted(argument) or "").rpartition(".")[2] for argument in call.args}
    if optimizer.rpartition(".")[2] in given or any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    return span_of(file, call, label=f"is not given `{optimizer}`", role="culprit")
