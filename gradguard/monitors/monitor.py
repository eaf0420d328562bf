"""What a monitor is: it follows something from step to step, and returns findings; it judges nothing and words nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from gradguard.instrumentation.fault_barrier import barred

if TYPE_CHECKING:
    import weakref

    from gradguard.core.callsite import CallSite
    from gradguard.instrumentation.facts import BackwardFact
    from gradguard.monitors.findings import Finding
    from gradguard.monitors.optimizer_books import Book, Part
    from gradguard.monitors.view import View

_EVENTS = ("on_backward", "on_zero_grad", "before_use", "on_step", "on_clip", "on_close")


class Backward(NamedTuple):
    """A backward call has returned.

    Attributes:
        call: its fact.
        roots: what it was called on.
        filled: the optimizers that it gave gradient to, as far as that is known; `last_part` of each is the call's.
    """

    call: BackwardFact
    roots: tuple[Any, ...]
    filled: list[Book]


class Zeroing(NamedTuple):
    """zero_grad() has cleared contributions that no step of an optimizer has used.

    Attributes:
        book: the optimizer.
        parts: the backward calls.
        site: the user's line.
        owner: the optimizer or module whose zero_grad() it was.
    """

    book: Book
    parts: Iterable[Part]
    site: CallSite | None
    owner: weakref.ref[Any]


class Step(NamedTuple):
    """An optimizer has stepped, and what it used is counted.

    Attributes:
        fresh, same, none: of the followed parameters, those with a new gradient, with that of the last step, with none.
        stale: whether a new one came on top of one that was used before.
        written: whether gradients were written after backward, by other means than a scaler's.
        survey: whether it is one after which everything of the optimizer is looked at.
    """

    book: Book
    optimizer: Any
    fresh: int
    same: int
    none: int
    stale: bool
    written: bool
    survey: bool


class Clipping(NamedTuple):
    """Gradients are about to be clipped."""

    parameters: list[Any]
    limit: float
    site: CallSite | None


class Monitor:
    """Base of all monitors. The events that one does not override cost nothing; one that fails costs itself.

    Attributes:
        PART: what it is called where it fails.
        ASLEEP: whether `on_backward` comes before the optimizers' gradients are looked at, and also while none are followed.
    """

    PART: ClassVar[str]
    ASLEEP: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in _EVENTS:
            if name in vars(cls):
                setattr(cls, name, barred(vars(cls)[name]))

    def on_backward(self, event: Backward, view: View) -> Iterable[Finding]:
        """A backward call has returned."""
        return ()

    def on_zero_grad(self, event: Zeroing, view: View) -> Iterable[Finding]:
        """Gradients were cleared unused."""
        return ()

    def before_use(self, book: Book, view: View) -> Iterable[Finding]:
        """An optimizer has stepped; its contributions are not counted as used yet."""
        return ()

    def on_step(self, event: Step, view: View) -> Iterable[Finding]:
        """An optimizer has stepped."""
        return ()

    def on_clip(self, event: Clipping, view: View) -> Iterable[Finding]:
        """Gradients are about to be clipped."""
        return ()

    def on_close(self, book: Book, view: View) -> Iterable[Finding]:
        """An optimizer is gone, or training has come to its end."""
        return ()


def listeners(monitors: Iterable[Monitor], event: str) -> tuple[Monitor, ...]:
    """The monitors that override an event."""
    return tuple(each for each in monitors if getattr(type(each), event) is not getattr(Monitor, event))
