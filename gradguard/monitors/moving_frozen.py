"""Parameters that were frozen and go on moving: they kept a gradient, and the optimizer looks at nothing else. Part of GG613."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradguard.monitors.findings import Suspicion, few_values
from gradguard.monitors.optimizer_books import Book

if TYPE_CHECKING:
    from gradguard.monitors.gradient_ledger import Ledger


def look(ledger: Ledger, book: Book) -> None:
    """After the step that follows a survey: which of the frozen parameters with a gradient it has moved."""
    frozen, book.frozen = book.frozen, []
    moved = [ref for ref, values in frozen if (p := ref()) is not None and _held(p) and few_values(p) != values]
    if moved and not book.said_moving and book.steps == book.frozen_at + 1:
        book.said_moving = True
        ledger.found.append(Suspicion("GG613", book, {"moved": moved}))


def _held(parameter: Any) -> bool:
    return parameter is not None and not parameter.requires_grad and parameter.grad is not None
