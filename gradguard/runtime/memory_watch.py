"""The fullest moment of a run: what is held for backward then, and what else there is."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

from torch import nn

from gradguard.analysis.live.frames import live_frames
from gradguard.analysis.live.names import Names
from gradguard.analysis.memory.accounting import account
from gradguard.analysis.memory.report import device_memory, process_memory, report_of
from gradguard.core.account import Account
from gradguard.core.memory_report import DeviceMemory, MemoryReport
from gradguard.instrumentation.facts import SavedFact
from gradguard.instrumentation.journal import Journal
from gradguard.instrumentation.tensor_refs import UncountedRef
from gradguard.probes.saved_tensor_hooks import Evaluations, SavedTensors

_FIRST = 4  # moments of a run that are always looked at: optimizers get their state at the first step
_AGAIN = 64  # of the moments that are no fuller than the fullest one, one in so many is looked at


class MemoryWatch:
    """What a run remembers of memory."""

    PART = "account of memory"

    def __init__(self) -> None:
        self.account: Account | None = None  # at the fullest moment
        self.step = 0
        self.moment = ""
        self.evaluations = Evaluations()
        self._saved = -1  # bytes that the probe knew of then
        self._seen = 0
        self._process: int | None = None
        self._devices: list[DeviceMemory] = []
        self._gradients = 0
        self._modules: list[tuple[str | None, weakref.ref[nn.Module]]] = []
        self._optimizers: list[weakref.ref[Any]] = []

    def before_backward(
        self, saving: SavedTensors, journal: Journal, roots: Sequence[Any], frame: FrameType, models: Sequence[nn.Module]
    ) -> None:
        """A backward call begins: what it needs is all there."""
        self._seen += 1
        if self._seen <= _FIRST:
            names = Names(live_frames(frame), models)
            self._modules = [(name, UncountedRef(module)) for name, module in names.modules]
            self._optimizers = [UncountedRef(optimizer) for optimizer in names.optimizers()]
        elif saving.held < self._saved or (saving.held == self._saved and self._seen % _AGAIN):
            return
        self._look(saving.held, journal, roots, "as backward began")

    def step_ends(self, saving: SavedTensors, journal: Journal) -> None:
        """A step is over: whether there was a fuller moment than that at which its backward began."""
        if saving.peak > max(self._saved, 0):
            self._look(saving.peak, journal, (), "in forward", saving.at_peak())

    def after_backward(self) -> None:
        """A backward call has returned: all gradients are there."""
        if self._seen <= _FIRST:
            self._gradients = max(self._gradients, self._account((), Journal()).total("gradients"))

    def _look(self, saved: int, journal: Journal, roots: Sequence[Any], moment: str, facts: Sequence[SavedFact] | None = None) -> None:
        found = self._account(roots, journal, facts)
        self._saved = max(self._saved, saved)
        if self.account is None or found.total() >= self.account.total():
            self.account, self.step, self.moment = found, journal.step, moment
            self._process, self._devices = process_memory(), device_memory()

    def _account(self, roots: Sequence[Any], journal: Journal, facts: Sequence[SavedFact] | None = None) -> Account:
        modules = [(name, module) for name, ref in self._modules if (module := ref()) is not None]
        optimizers = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        return account(roots, modules, optimizers, journal, facts)

    def report(self) -> MemoryReport | None:
        """The fullest moment; None where none was seen."""
        if self.account is None:
            return None
        return report_of(
            self.account,
            self.step,
            self.moment,
            gradients=self._gradients,
            evaluation=self.evaluations.most,
            process=self._process,
            devices=self._devices,
        )


def present_memory(journal: Journal, frame: FrameType, models: Sequence[nn.Module]) -> MemoryReport:
    """What holds memory now, as far as variables around `frame` lead to it."""
    names = Names(live_frames(frame), models)
    roots = [tensor for _, tensor in names.tensor_bindings()]
    found = account(roots, names.modules, names.optimizers(), journal)
    return report_of(found, journal.step, "now", process=process_memory(), devices=device_memory())
