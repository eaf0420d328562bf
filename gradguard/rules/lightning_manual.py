"""Lightning's manual optimization: fits in which nobody applies the loss, and optimizers whose parameters are toggled off."""

from __future__ import annotations

import ast
from types import CodeType
from typing import Any

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, dotted, function_def, resolve, span_of
from gradguard.analysis.program.expressions import inside
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.safe_read import UNKNOWN, follow, function_code, in_class, peek, unwrapped
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.lightning_fits import Fit


def idle_fit(fit: Fit, code: str, name: str) -> Diagnosis:
    """The diagnosis of a fit that has trained nothing."""
    owner = fit.kind.__name__
    step = step_code(fit.kind)
    flag = _flag(fit.kind)
    definition = None if step is None else function_def(step)
    returned = [node for node in inside(definition, ast.Return) if node.value]
    loss = returned[0].value if len(returned) == 1 else None
    text = loss.id if isinstance(loss, ast.Name) else "loss"
    back: SourceSpan | None = None
    if step is not None and definition is not None:
        back = span_of(step.co_filename, returned[0] if len(returned) == 1 else definition, label="", role="context")
        back = back.model_copy(update={"end_line": back.line, "end_column": back.end_column if back.end_line == back.line else None})
    asked = definition is not None and any(dotted(node.func) == "self.optimizers" for node in inside(definition, ast.Call))
    by_hand = f"`self.manual_backward({text})`, `opt.step()`"
    here = Fix(
        title=f"Train in `training_step` itself: {by_hand} before it returns"
        if asked
        else f"Keep it and train in `training_step` itself: `opt = self.optimizers()`, `opt.zero_grad()`, {by_hand}",
        safety="unsafe",
    )
    leave = Fix(
        title="Leave automatic optimization on: then Lightning runs backward and the step on the loss that is returned", safety="unsafe"
    )
    remove = Fix(
        title=f"Remove `{flag.text}`: Lightning then runs backward and the step on what is returned" if flag is not None else "",
        safety="unsafe",
    )
    culprit: SourceSpan | None
    why_flag = "Lightning runs no backward and no step for this module"
    why_back = "only returned: nothing runs backward on it"
    if flag is not None and not asked:
        culprit = flag.model_copy(update={"label": why_flag, "role": "culprit"})
        related = [] if back is None else [back.model_copy(update={"label": why_back})]
        fixes = [remove, here]
    else:
        culprit = None if back is None else back.model_copy(update={"label": why_back, "role": "culprit"})
        related = [] if flag is None else [flag.model_copy(update={"label": why_flag})]
        fixes = [here, leave] if asked else [leave, here]
    batches = fit.progress.total.completed
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"`training_step` of `{owner}` returns a loss and optimization is manual: no backward and no step in {batches} batches",
        culprit=culprit,
        related=related,
        explanation="Under manual optimization Lightning only calls `training_step`; what it returns is kept for callbacks, and backward "
        f"and step are the module's own business. Nothing called them, and the {len(fit._trained)} parameters that the loss leads to are "
        "exactly those of the beginning.",
        fixes=fixes,
    )


def step_code(kind: type) -> CodeType | None:
    """The code of a class's own training_step, decorators aside."""
    return function_code(unwrapped(in_class(kind, "training_step")))


def _flag(kind: type) -> SourceSpan | None:
    """Where the class switches automatic optimization off."""
    from gradguard.rules.spans import attribute_set

    for each in kind.__mro__:
        place = attribute_set(each, "automatic_optimization")
        if place is not None:
            return place.statement_span("", "context")
    return None


def toggled_off(incident: Incident, parameters: list[torch.Tensor]) -> ResolvedSite | None:
    """The `toggle_optimizer` of another optimizer that has frozen all of these parameters, the last to have switched any of them."""
    switches = [incident.journal.toggle_of(parameter) for parameter in parameters]
    sites = {None if known is None or known[0] else known[1] for known in switches}
    place = resolve(sites.pop()) if len(sites) == 1 else None
    toggled = place is not None and (place.callee or "").endswith(".toggle_optimizer")
    return place if toggled and not any(parameter.requires_grad for parameter in parameters) else None


def toggled_twice(incident: Incident) -> bool:
    """Whether an optimizer was toggled while another one still was: then it is off itself, by the flags of the first toggle."""
    for view in incident.frames:
        state = peek(view.locals.get("self"), "_param_requires_grad_state", None)
        if type(state) is dict and state:
            books = incident.notes[Ledger].books.values()
            return not any(p.requires_grad for p in state) and not any(book.frozen for book in books)
    return False


def module_of(value: Any) -> Any:
    """The LightningModule that a trainer or a strategy of Lightning's is at work on; UNKNOWN for other objects."""
    strategy = follow(value, "_accelerator_connector.strategy")
    return peek(value if strategy is UNKNOWN else strategy, "_lightning_module")


def is_module(value: Any) -> bool:
    """Whether this is a LightningModule."""
    return any(kind.__name__ == "LightningModule" for kind in type(value).__mro__)
