"""Whether memory grows from step to step: the process's own, and what tensors hold on an accelerator.

It is read once in each step that is looked at at all, which costs some microseconds.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradguard.core.foreign_exceptions import internal_error
from gradguard.monitors.findings import Finding
from gradguard.monitors.monitor import Monitor, Step

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from gradguard.monitors.view import View

_LEAST = 32 << 10  # bytes a step
_IN_A_ROW = 2  # steps that have grown before anything is looked for
_LOOKS = 4
_PAGE = mmap.PAGESIZE
_UNIT = 1 if sys.platform == "darwin" else 1 << 10  # of `ru_maxrss`


@dataclass(frozen=True, eq=False)
class MemoryGrew(Finding):
    """Memory has grown in each of the last steps: a look at what grows is due."""

    CODE = "GG807"
    ROUTINE = True

    step: int


class Growth(Monitor):
    """The readings of a run."""

    PART = "watch of memory that grows"

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None
        self._step = 0
        self._row = 0  # steps in a row that have grown
        self._looks = 0  # since the row began
        self._rest = 0  # the step up to which nothing is looked for

    def on_step(self, event: Step, view: View) -> Sequence[Finding]:
        step = view.steps
        if step == self._step:  # another optimizer of the same one
            return ()
        following, self._step = step == self._step + 1, step
        now, before = _reading(), self._last
        self._last = now
        if before is None or not following or not any(new >= old + _LEAST for new, old in zip(now, before, strict=True)):
            self._row = self._looks = 0
            return ()
        self._row += 1
        if self._row < _IN_A_ROW or step < self._rest:
            return ()
        self._looks += 1
        if self._looks > _LOOKS:  # whatever grows is nothing that can be found: sequences that get longer, a process that warms up
            self._rest, self._looks = 4 * step, 0
            return ()
        return (MemoryGrew(None, step),)


def _reading() -> tuple[int, int]:
    """The memory that this process has by now, and what tensors hold on the accelerator."""
    return _resident(), torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]


def _resident() -> int:
    """In bytes; where the system does not say, the most that it has had."""
    try:
        with open("/proc/self/statm", "rb", 0) as file:
            return int(file.read().split()[1]) * _PAGE
    except internal_error(OSError):
        return 0 if resource is None else int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * _UNIT
