"""Parameters that were frozen and go on moving: they kept a gradient, and the optimizer looks at nothing else. Part of GG613."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradguard.monitors.findings import Finding
from gradguard.monitors.optimizer_books import Book
from gradguard.monitors.tensor_state import few_values

if TYPE_CHECKING:
    from gradguard.monitors.gradient_ledger import Ledger


@dataclass(frozen=True, eq=False)
class MovingFrozen(Finding):
    """A step has moved parameters that are frozen."""

    CODE = "GG613"

    moved: list[weakref.ref[Any]]


def look(ledger: Ledger, book: Book) -> None:
    """After the step that follows a survey: which of the frozen parameters with a gradient it has moved."""
    frozen, book.frozen = book.frozen, []
    moved = [ref for ref, values in frozen if (p := ref()) is not None and _held(p) and few_values(p) != values]
    if moved and not book.said_moving and book.steps == book.frozen_at + 1:
        book.said_moving = True
        ledger.found.append(MovingFrozen(book, moved))


def _held(parameter: Any) -> bool:
    return parameter is not None and not parameter.requires_grad and parameter.grad is not None
