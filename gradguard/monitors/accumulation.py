"""Gradient accumulation: whether one line's mean losses are summed without a scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradguard.core.foreign_exceptions import internal_error
from gradguard.monitors.findings import Finding
from gradguard.monitors.monitor import Backward, Monitor, Step

if TYPE_CHECKING:
    from gradguard.monitors.optimizer_books import Book, Part
    from gradguard.monitors.view import View

_MEANS = (
    "MeanBackward",
    "MseLossBackward",
    "NllLoss",
    "BinaryCrossEntropy",
    "L1LossBackward",
    "SmoothL1LossBackward",
    "HuberLossBackward",
    "SoftMarginLossBackward",
)
_ENOUGH = 3  # steps


@dataclass(frozen=True, eq=False)
class UnscaledSum(Finding):
    """Each step uses the same number of one line's mean losses, none of them scaled."""

    CODE = "GG616"

    times: int


def is_plain_mean(node: Any) -> bool:
    """Whether a loss is a mean over the batch with nothing multiplied to it."""
    try:
        name = str(node.name())
        if not name.startswith(_MEANS):
            return False
        reduction = getattr(node, "_saved_reduction", 1)
        return bool(reduction == 1)
    except internal_error():
        return False


class Accumulation(Monitor):
    """See the module's docstring."""

    PART = "watch of gradient accumulation"

    def on_backward(self, event: Backward, view: View) -> Sequence[Finding]:
        for book in event.filled:
            if book.filled_since_step > 1 and book.last_part is not None:
                _note(book, book.last_part, event.roots)
        return ()

    def on_step(self, event: Step, view: View) -> Sequence[Finding]:
        book, found = event.book, list[Finding]()
        if book.filled_since_step > 1 and book.same_line and book.same_line == book.filled_since_step - 1:
            counts = book.gathered.setdefault("accumulated", [])
            counts.append(book.filled_since_step)
            if len(counts) == _ENOUGH and len(set(counts)) == 1:
                found.append(UnscaledSum(book, counts[0]))
            del counts[:-_ENOUGH]
        elif book.filled_since_step > 1:
            book.gathered.pop("accumulated", None)
        return found


def _note(book: Book, part: Part, roots: tuple[Any, ...]) -> None:
    """The second and further backward calls of one step."""
    earlier = next((slot.parts[0] for slot in book.active if len(slot.parts) > 1), None)
    if earlier is None or len(roots) != 1:
        return
    if earlier.call.stack == part.call.stack and is_plain_mean(getattr(roots[0], "grad_fn", None)):
        book.same_line += 1
