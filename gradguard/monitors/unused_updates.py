"""Updates that are computed, and dropped: of parameters that nothing else moves either.

The op probe sees in traced steps which results nothing has used (`gradguard.probes.unused_results`). An update of a moving average has
a tensor that an optimizer trains among its operands and one that stays as it was, and lies between the two; an update by hand has a
leaf and that leaf's gradient. Both count only where the same line has dropped them again twelve steps later, and nothing has written
the parameters in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gradguard.instrumentation.tensor_refs import TensorRef
from gradguard.monitors.findings import Finding, TraceNext
from gradguard.monitors.monitor import Backward, Monitor, Step
from gradguard.monitors.tensor_state import few_values, version_of
from gradguard.probes.unused_results import Stack, Unused
from gradguard.torch_compat.private_api import storage_key

if TYPE_CHECKING:
    from gradguard.monitors.view import View

_APART = 12  # steps between the first average that was dropped and the last
_APART_BY_HAND = 6  # steps, or backward calls where no optimizer steps, between updates by a gradient
_MOST_LINES, _MOST_PARAMETERS = 32, 256
_MOST_TRACED = 3  # times that steps are traced for one line


@dataclass(frozen=True, eq=False)
class UpdateDropped(Finding):
    """Results that would have changed parameters were dropped, again and again.

    Attributes:
        stack: where they were computed.
        parameters: what they were to change, and has not changed.
        steps: for how many steps, or backward calls where no optimizer steps.
        average: whether they lie between these parameters and others that are trained.
        variable: what the function calls the parameter, each time it computes one.
    """

    CODE = "GG611"

    stack: Stack
    parameters: list[TensorRef]
    steps: int
    average: bool
    variable: str | None


@dataclass
class _Line:
    """A line that drops updates."""

    stack: Stack
    average: bool
    first: int
    last: int
    still: dict[int, tuple[TensorRef, int, list[float]]] = field(default_factory=dict)  # what does not move: version and values at first
    names: set[str | None] = field(default_factory=set)  # of what does not move, in the function
    traced: int = 0
    due: int = 0
    over: bool = False

    @property
    def apart(self) -> int:
        return _APART if self.average else _APART_BY_HAND


class UnusedUpdates(Monitor):
    """The lines that drop updates."""

    PART = "look-out for updates that are dropped"

    def __init__(self) -> None:
        self._lines: dict[tuple[tuple[int, int], ...], _Line] = {}

    def on_backward(self, event: Backward, view: View) -> Iterable[Finding]:
        return self._look(view) if not view.books else ()

    def on_step(self, event: Step, view: View) -> Iterable[Finding]:
        return self._look(view)

    def _look(self, view: View) -> Iterator[Finding]:
        now = view.steps if view.books else view.backwards
        for unused in view.journal.unused_results():
            self._note(unused, now, view)
        for line in self._lines.values():
            if line.over or now < line.due:
                continue
            if line.last - line.first >= line.apart:
                line.over = True
                still = [ref for ref, version, values in line.still.values() if _same(ref(), version, values)]
                if still and len(still) == len(line.still):
                    book = next(iter(view.books.values()), None)
                    variable = next(iter(line.names)) if len(line.names) == 1 else None
                    yield UpdateDropped(book, line.stack, still, line.last - line.first, line.average, variable)
            elif line.traced < _MOST_TRACED:
                line.traced += 1
                line.due = now + 4
                view.wake()
                yield TraceNext(None)
            else:
                line.over = True

    def _note(self, unused: Unused, now: int, view: View) -> None:
        alive = [each for operand in unused.operands if (each := operand.ref()) is not None]
        average = unused.leaf is None
        leaf = None if unused.leaf is None else unused.leaf()
        key = tuple((id(site.code), site.line) for site in unused.stack)  # a call has another instruction once it is specialised
        line = self._lines.get(key)
        still = _averaged(unused, alive, view, line) if average else leaf
        if still is None or (line is None and len(self._lines) >= _MOST_LINES):
            return
        if line is None:
            line = self._lines[key] = _Line(unused.stack, average, now, now)
            line.due = now + line.apart
            view.wake(line.apart + 8)
        line.last = now
        line.names.update(name for operand, name in zip(unused.operands, unused.names, strict=False) if operand.ref() is still)
        if now == line.first and len(line.still) < _MOST_PARAMETERS:
            line.still.setdefault(id(still), (TensorRef(still), version_of(still), few_values(still)))


def _same(tensor: Any, version: int, values: list[float]) -> bool:
    return tensor is not None and version_of(tensor) == version and few_values(tensor) == values


def _averaged(unused: Unused, alive: list[Any], view: View, line: _Line | None) -> Any:
    """The operand that an average is to move: the one of two that no optimizer trains."""
    if len(alive) != 2 or ((unused.values or line is None) and not (len(unused.values) == 3 and _lies_between(*unused.values))):
        return None
    trained = {storage_key(p) for book in view.books.values() for p in book.parameters()}
    still = [each for each in alive if storage_key(each) not in trained]
    return still[0] if len(still) == 1 else None


def _lies_between(result: tuple[float, ...], one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether a result's values are between those of the two that it was made of, and not all of them are zero."""
    told = False
    for r, a, b in zip(result, one, other, strict=True):
        slack = 1e-2 * abs(a - b) + 1e-5 * max(abs(a), abs(b))
        if not min(a, b) - slack <= r <= max(a, b) + slack:
            return False
        told = told or abs(r) > slack
    return told
