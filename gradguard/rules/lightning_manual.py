"""Lightning's manual optimization: fits in which nobody applies the loss, and optimizers whose parameters are toggled off."""

from __future__ import annotations

import ast
import sys
import weakref
from collections.abc import Mapping
from types import CodeType
from typing import TYPE_CHECKING, Any, cast

import torch

from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.analysis.places.source import ResolvedSite, dotted, function_def, resolve, span_of
from gradguard.analysis.incident import Incident
from gradguard.monitors.surveys import Stranger, leaves
from gradguard.core.safe_read import UNKNOWN, follow, function_code, in_class, peek, unwrapped, variables_of
from gradguard.torch_compat.private_api import quiet

if TYPE_CHECKING:
    from gradguard.monitors.gradient_ledger import Ledger

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_LOOKS = 3  # batches whose loss is looked at
_BATCHES = 10  # of the whole fit, without a backward and without a step, before it is called idle
_DEEP = 60  # frames between an optimizer's construction and the trainer that asked for it


class Fit:
    """One fit under manual optimization: does anything apply the losses that its training_step returns?

    Args:
        module: the LightningModule.
        ledger: counts backward calls and steps.

    Raises:
        AttributeError: this Lightning keeps its count of batches elsewhere.
    """

    def __init__(self, module: Any, ledger: Ledger) -> None:
        self.module: weakref.ref[Any] = weakref.ref(module)
        self.kind: type = type(module)
        self.progress = peek(module, "_trainer").fit_loop.epoch_loop.batch_progress  # numbers, and nothing else
        self._before = (ledger.backwards, ledger.steps)
        self._looks = 0
        self._trained: list[Stranger] = []  # what the losses returned lead to

    def look(self, output: Any) -> bool:
        """What training_step has returned; whether that was enough."""
        loss = output.get("loss") if isinstance(output, Mapping) else output
        with quiet():
            found = leaves((loss,)) if isinstance(loss, torch.Tensor) else []
            if found and not self._looks:
                self._trained = [Stranger(leaf, 0, 0) for leaf in found]
        self._looks = self._looks + 1 if found else _LOOKS
        if not found:
            self._trained = []
        return self._looks >= _LOOKS

    def idle(self, ledger: Ledger) -> bool:
        """Whether no backward and no step came of all the batches, and nothing else has changed what the losses lead to."""
        return (
            self._looks >= _LOOKS
            and bool(self._trained)
            and (ledger.backwards, ledger.steps) == self._before
            and self.progress.total.completed >= _BATCHES
            and all(each.same() for each in self._trained)
        )


def begun(ledger: Ledger) -> Fit | None:
    """The fit for which an optimizer has just been made, if one is and its optimization is manual."""
    if not any(name in sys.modules for name in _PACKAGES):
        return None
    frame = sys._getframe(1)
    for _ in range(_DEEP):
        if frame.f_code.co_name == "_init_optimizers_and_lr_schedulers":
            break
        if frame.f_back is None:
            return None
        frame = frame.f_back
    module = variables_of(frame).get("model")
    if module is None or automatic(module):
        return None
    known = next((book.fit for book in ledger.books.values() if book.fit is not None and book.fit.module() is module), None)
    try:
        strategy = follow(peek(module, "_trainer"), "_accelerator_connector.strategy")
        if known is not None or "training_step" in vars(strategy):
            return known
        fit = Fit(module, ledger)
        vars(strategy)["training_step"] = _looked_at(weakref.ref(strategy), fit)
    except (AttributeError, TypeError):
        return None
    return fit


def _looked_at(owner: weakref.ref[Any], fit: Fit) -> Any:
    """The strategy's training_step, which takes itself away after the first batches."""

    def training_step(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        strategy = owner()
        output = type(cast(Any, strategy)).training_step(strategy, *args, **kwargs)
        if fit.look(output):
            vars(strategy).pop("training_step", None)
        return output

    return training_step


def idle_fit(fit: Fit, code: str, name: str) -> Diagnosis:
    """The diagnosis of a fit that has trained nothing."""
    owner = fit.kind.__name__
    step = step_code(fit.kind)
    flag = _flag(fit.kind)
    definition = None if step is None else function_def(step)
    returned = [node for node in ast.walk(definition) if isinstance(node, ast.Return) and node.value] if definition is not None else []
    loss = returned[0].value if len(returned) == 1 else None
    text = loss.id if isinstance(loss, ast.Name) else "loss"
    back: SourceSpan | None = None
    if step is not None and definition is not None:
        back = span_of(step.co_filename, returned[0] if len(returned) == 1 else definition, label="", role="context")
        back = back.model_copy(update={"end_line": back.line, "end_column": back.end_column if back.end_line == back.line else None})
    asked = definition is not None and any(
        isinstance(node, ast.Call) and dotted(node.func) == "self.optimizers" for node in ast.walk(definition)
    )
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


def automatic(module: Any) -> bool:
    """Whether a LightningModule is under automatic optimization."""
    return peek(module, "automatic_optimization", True) is not False


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
            books = incident.memory["ledger"].books.values()
            return not any(p.requires_grad for p in state) and not any(book.frozen for book in books)
    return False


def module_of(value: Any) -> Any:
    """The LightningModule that a trainer or a strategy of Lightning's is at work on; UNKNOWN for other objects."""
    strategy = follow(value, "_accelerator_connector.strategy")
    return peek(value if strategy is UNKNOWN else strategy, "_lightning_module")


def is_module(value: Any) -> bool:
    """Whether this is a LightningModule."""
    return any(kind.__name__ == "LightningModule" for kind in type(value).__mro__)
