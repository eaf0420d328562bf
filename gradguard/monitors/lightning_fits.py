"""Fits under Lightning's manual optimization: does anything apply the losses that `training_step` returns?"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any, cast

import torch

from gradguard.core.safe_read import follow, peek, variables_of
from gradguard.instrumentation.tensor_refs import UncountedRef
from gradguard.monitors.findings import Finding
from gradguard.monitors.untrained_leaves import Stranger, leaves
from gradguard.torch_compat.private_api import quiet

if TYPE_CHECKING:
    from gradguard.monitors.optimizer_books import Book
    from gradguard.monitors.view import View


_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


_LOOKS = 3  # batches whose loss is looked at


_BATCHES = 10  # of the whole fit, without a backward and without a step, before it is called idle


_DEEP = 60  # frames between an optimizer's construction and the trainer that asked for it


@dataclass(frozen=True, eq=False)
class IdleFit(Finding):
    """A fit under manual optimization has run, and nothing has applied what it computes."""

    CODE = "GG741"

    fit: Fit


@dataclass(frozen=True, eq=False)
class NoLossReturned(Finding):
    """Automatic optimization, and training_step has returned no loss in any batch so far."""

    CODE = "GG741"

    owner: str
    function: CodeType
    batches: int | None


class Fit:
    """One fit under manual optimization: does anything apply the losses that its training_step returns?

    Args:
        module: the LightningModule.
        view: counts backward calls and steps.

    Raises:
        AttributeError: this Lightning keeps its count of batches elsewhere.
    """

    def __init__(self, module: Any, view: View) -> None:
        self.module: weakref.ref[Any] = UncountedRef(module)
        self.kind: type = type(module)
        self.progress = peek(module, "_trainer").fit_loop.epoch_loop.batch_progress  # numbers, and nothing else
        self._before = (view.backwards, view.steps)
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

    def idle(self, view: View) -> bool:
        """Whether no backward and no step came of all the batches, and nothing else has changed what the losses lead to."""
        return (
            self._looks >= _LOOKS
            and bool(self._trained)
            and (view.backwards, view.steps) == self._before
            and self.progress.total.completed >= _BATCHES
            and all(each.same() for each in self._trained)
        )


def begun(view: View) -> Fit | None:
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
    known = next((book.fit for book in view.books.values() if book.fit is not None and book.fit.module() is module), None)
    try:
        strategy = follow(peek(module, "_trainer"), "_accelerator_connector.strategy")
        if known is not None or "training_step" in vars(strategy):
            return known
        fit = Fit(module, view)
        vars(strategy)["training_step"] = _looked_at(UncountedRef(strategy), fit)
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


def automatic(module: Any) -> bool:
    """Whether a LightningModule is under automatic optimization."""
    return peek(module, "automatic_optimization", True) is not False


def idle_fit(view: View, book: Book) -> Finding:
    """A fit has run, and nothing has applied what it computes; said once for all optimizers of the fit."""
    fit = book.fit
    for each in (book, *view.books.values(), *view.ended):
        if each.fit is fit:
            each.fit = None
    return IdleFit(book, fit)
