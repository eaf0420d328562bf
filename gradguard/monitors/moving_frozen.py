"""Parameters that were frozen and go on moving: they kept a gradient, and the optimizer looks at nothing else. Part of GG613."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradguard.instrumentation.fault_barrier import barred
from gradguard.monitors.findings import Finding
from gradguard.monitors.monitor import Monitor, Step
from gradguard.monitors.optimizer_books import Book
from gradguard.monitors.tensor_state import few_values

if TYPE_CHECKING:
    from gradguard.monitors.view import View


@dataclass(frozen=True, eq=False)
class MovingFrozen(Finding):
    """A step has moved parameters that are frozen."""

    CODE = "GG613"

    moved: list[weakref.ref[Any]]


class FrozenMoves(Monitor):
    """See the module's docstring."""

    PART = "watch of frozen parameters"

    def on_step(self, event: Step, view: View) -> list[Finding]:
        return self.look(event.book) if event.book.frozen else []

    @barred
    def look(self, book: Book) -> list[Finding]:
        """After the step that follows a survey: which of the frozen parameters with a gradient it has moved."""
        frozen, book.frozen = book.frozen, []
        moved = [ref for ref, values in frozen if (p := ref()) is not None and _held(p) and few_values(p) != values]
        if not moved or book.said_moving or book.steps != book.frozen_at + 1:
            return []
        book.said_moving = True
        return [MovingFrozen(book, moved)]


def _held(parameter: Any) -> bool:
    return parameter is not None and not parameter.requires_grad and parameter.grad is not None
