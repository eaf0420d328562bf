"""What a GradScaler has scaled and not yet unscaled, for the rules about clipping (GG721) and about steps past it (GG722)."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradguard.core.callsite import CallSite
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import UNKNOWN, peek
from gradguard.instrumentation.fault_barrier import barred
from gradguard.instrumentation.tensor_refs import UncountedRef
from gradguard.monitors.findings import Finding
from gradguard.monitors.monitor import Backward, Clipping, Monitor, Step
from gradguard.monitors.tensor_state import version_of

if TYPE_CHECKING:
    from gradguard.monitors.optimizer_books import Book, Part
    from gradguard.monitors.view import View

_TIMES = 2  # one clipping at a line could be an accident of a first step


@dataclass(frozen=True, eq=False)
class ClippedScaled(Finding):
    """Gradients are clipped that are scaled and not unscaled yet."""

    CODE = "GG721"

    site: CallSite | None
    scaled: CallSite | None
    scale: float
    scaler: weakref.ref[Any] | None


@dataclass(frozen=True, eq=False)
class SteppedPastScaler(Finding):
    """An optimizer steps directly, on gradients of a scaled loss."""

    CODE = "GG722"

    scaled: CallSite | None
    scale: float


@dataclass(frozen=True, eq=False)
class NeverScaled(Finding):
    """A scaler has divided gradients of a loss that it has not multiplied."""

    CODE = "GG722"

    backward: CallSite | None
    scale: float


class Scaling(Monitor):
    """Between `scale(loss)` and `update()`."""

    PART = "watch of gradient scalers"

    def __init__(self) -> None:
        self._scaler: weakref.ref[Any] | None = None
        self._site: CallSite | None = None
        self._clips: dict[CallSite | None, int] = {}
        self._awaited = False  # a loss was scaled whose backward is still to come
        self._outstanding = 0  # losses scaled, less backward calls: several may be scaled first, and some of them added up
        self._calls: deque[int] = deque(maxlen=64)  # backward calls on scaled losses
        self._plain: dict[int, int] = {}  # steps past the scaler, by the optimizer's book
        self._known: dict[int, weakref.ref[Any]] = {}  # every scaler that has scaled a loss and is alive, by its id
        self._bare: deque[int] = deque(maxlen=64)  # backward calls on losses that no scaler has scaled
        self._divided: dict[int, int] = {}  # steps through the scaler after such a call, by the optimizer's book

    @barred
    def scaled(self, scaler: Any, site: CallSite | None) -> None:
        """A loss was scaled."""
        self._scaler, self._site = UncountedRef(scaler), site
        self._awaited = True
        self._outstanding += 1
        known, key = self._known, id(scaler)
        if key not in known:
            known[key] = UncountedRef(scaler, lambda _: known.pop(key, None))

    def on_backward(self, event: Backward, view: View) -> Sequence[Finding]:
        """On a scaled loss, if one was scaled since the last."""
        call = event.call
        outstanding = self._outstanding > 0
        self._outstanding -= outstanding and not call.nested
        if self._awaited:
            self._awaited = call.nested  # a reentrant checkpoint's own backward calls return before that on the loss
            self._calls.append(call.index)
        elif self._known and not outstanding and not call.nested and call.kind == "backward" and not any(map(may_be_scaled, event.roots)):
            self._bare.append(call.index)
        return ()

    @property
    def on(self) -> bool:
        """Whether a loss was scaled, and no update() has come since."""
        return self._scaler is not None

    @property
    def scalers(self) -> list[Any]:
        """Those that have scaled a loss at any time, and are alive."""
        return [scaler for ref in list(self._known.values()) if (scaler := ref()) is not None]

    @property
    def used(self) -> bool:
        """Whether a scaler has scaled a loss at any time, and is alive."""
        return bool(self._known)

    def on_step(self, event: Step, view: View) -> Sequence[Finding]:
        """On gradients that are still scaled, or that never were?"""
        return list(self._stepped(view, event.book, event.optimizer, event.written)) if event.fresh else ()

    def _stepped(self, view: View, book: Book, optimizer: Any, written: bool) -> Iterator[Finding]:
        scaler = None if self._scaler is None else self._scaler()
        used = book.last_used
        if used is not None and used.call.index in self._bare:
            yield from self._never_scaled(view, book, optimizer, used, written)
        if scaler is None or used is None or used.call.index not in self._calls or not peek(scaler, "_enabled", False):
            return
        states, scale = peek(scaler, "_per_optimizer_states", None), peek(scaler, "_scale", None)
        if states is None or scale is None or peek(optimizer, "grad_scale") is not UNKNOWN:
            return
        state = states.get(id(optimizer)) if id(optimizer) in states else None
        by_hand = written or used.reads != view.journal.grad_reads  # divided by the scale, perhaps
        if by_hand or getattr(state.get("stage") if state else None, "name", "READY") != "READY":
            self._plain[book.key] = -1_000_000
            return
        count = self._plain[book.key] = self._plain.get(book.key, 0) + 1
        if count == _TIMES and float(scale) != 1.0:
            yield SteppedPastScaler(book, self._site, float(scale))

    def _never_scaled(self, view: View, book: Book, optimizer: Any, used: Part, written: bool) -> Iterator[Finding]:
        """A scaler has divided gradients by its scale that come from a loss it has not multiplied."""
        for scaler in self.scalers:
            states, scale = peek(scaler, "_per_optimizer_states", None), peek(scaler, "_scale", None)
            if states is None or scale is None or id(optimizer) not in states or not peek(scaler, "_enabled", False):
                continue
            if getattr(states[id(optimizer)].get("stage"), "name", "READY") != "UNSCALED":
                continue
            # Multiplied by hand, perhaps: who reads gradients is seen in traced steps alone. A scaler's own writes are not counted.
            if used.reads != view.journal.grad_reads or (written and not used.call.traced):
                self._divided[book.key] = -1_000_000
                return
            count = self._divided[book.key] = self._divided.get(book.key, 0) + 1
            if count == _TIMES and float(scale) != 1.0:
                yield NeverScaled(book, used.call.site, float(scale))
            return

    @barred
    def updated(self) -> None:
        """`update()`: all optimizers are done with these gradients."""
        self._scaler, self._outstanding = None, 0

    def on_clip(self, event: Clipping, view: View) -> list[Finding]:
        """Are they still scaled?"""
        return list(self._clipped(event.parameters, event.limit, event.site, view))

    def _clipped(self, parameters: list[Any], limit: float, site: CallSite | None, view: View) -> Iterator[Finding]:
        scaler = None if self._scaler is None else self._scaler()
        if scaler is None or not parameters:
            return
        states = peek(scaler, "_per_optimizer_states", None)
        scale = peek(scaler, "_scale", None)
        if states is None or scale is None or not peek(scaler, "_enabled", False):
            return
        wanted = {id(parameter) for parameter in parameters}
        for key, book in list(view.books.items()):
            optimizer = book.ref()
            if optimizer is None or not any(id(p) in wanted for group in optimizer.param_groups for p in group["params"]):
                continue
            state = states.get(id(optimizer)) if id(optimizer) in states else None
            stage = getattr(state.get("stage") if state else None, "name", "READY")
            if stage != "READY" or touched(book) or limit >= 0.1 * float(scale):  # unscaled by hand, or a limit in scaled units
                self._clips[site] = -1_000_000
                return
            if view.asleep:  # whether they were unscaled by hand is not known
                return
            count = self._clips[site] = self._clips.get(site, 0) + 1
            if len(self._clips) > 64:
                self._clips.clear()
            if count == _TIMES and float(scale) != 1.0:
                yield ClippedScaled(view.books[key], site, self._site, float(scale), self._scaler)
            return


def may_be_scaled(root: Any) -> bool:
    """Whether the last operation was a product, as it is when a scaler has scaled, or somebody by hand."""
    node = getattr(root, "grad_fn", None)
    try:
        return node is None or str(node.name()).startswith(("MulBackward", "DivBackward"))
    except internal_error():
        return True


def touched(book: Book) -> bool:
    """Whether followed gradients were written since they were looked at after backward."""
    for slot in book.active:
        parameter = slot.ref()
        grad = None if parameter is None or not slot.grad else parameter.grad
        if grad is not None and (id(grad) != slot.grad or version_of(grad) != slot.version):
            return True
    return False
