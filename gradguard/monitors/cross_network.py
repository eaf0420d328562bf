"""Gradients that another network's loss has left: a step uses contributions from both sides of another optimizer's step.

A generator's loss goes through the discriminator and fills it too. Cleared before the discriminator's own backward, that is no harm;
cleared only right after its step, it is in the next one. A trunk that several heads' losses train looks alike by the order of
calls: there the other optimizer's parameters stand between the trunk and the loss, here they stand behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradguard.analysis.graph.walk import root_nodes
from gradguard.analysis.live.optimizer_contents import trained_by
from gradguard.core.callsite import CallSite
from gradguard.instrumentation.tensor_refs import UncountedRef
from gradguard.monitors.findings import Finding
from gradguard.monitors.monitor import Backward, Monitor
from gradguard.monitors.optimizer_books import Book, Part

if TYPE_CHECKING:
    from gradguard.monitors.view import View

_TIMES = 3
_MOST_NODES = 8_192


@dataclass(frozen=True, eq=False)
class LeftByAnother(Finding):
    """A step uses contributions from both sides of another optimizer's step."""

    CODE = "GG601"

    other: weakref.ref[Any]
    part: Part
    own: list[Part]  # contributions of its own to the same step


class Crossing(Monitor):
    """What was seen of it in one run; at most one pair of optimizers is followed at a time."""

    PART = "look-out for gradients of another network"

    def __init__(self) -> None:
        self._book: weakref.ref[Book] | None = None
        self._other: weakref.ref[Any] | None = None
        self._site: CallSite | None = None
        self._count = 0
        self._through: bool | None = None  # whether the other's parameters stand behind the book's, seen from the loss

    def before_use(self, book: Book, view: View) -> Sequence[Finding]:
        slot = next((slot for slot in book.active if len(slot.parts) > 1), None) if len(view.books) > 1 else None
        if slot is None:
            return ()
        old, new = slot.parts[0], slot.parts[-1]
        if not old.used or new.used or old.call.site == new.call.site:
            return ()
        other = _stepped_between(view, book, old, new)
        if other is None:
            return ()
        if self._book is None or self._book() is not book or self._site != old.call.site:
            self._book, self._other, self._site = weakref.ref(book), UncountedRef(other), old.call.site
            self._count, self._through = 0, None
        self._count += 1
        if self._count >= _TIMES and self._through:
            self._through = False  # said
            own = [part for part in slot.parts if not part.used]
            return (LeftByAnother(book, UncountedRef(other), old, own),)
        return ()

    def on_backward(self, event: Backward, view: View) -> Sequence[Finding]:
        if self._book is not None and self._through is None and event.call.site == self._site:
            self._look(event.roots)
        return ()

    def _look(self, roots: tuple[Any, ...]) -> None:
        """The call in question: which of the two networks its loss meets first."""
        book, other = self._book() if self._book is not None else None, self._other() if self._other is not None else None
        if book is None or other is None:
            return
        mine, theirs = {id(p) for p in book.parameters()}, trained_by(other)
        nodes = [(node, 0) for node in root_nodes(roots)]
        seen = {node for node, _ in nodes}
        first: dict[bool, int] = {}
        for node, depth in nodes:  # grows while it is read: breadth first
            leaf = getattr(node, "variable", None)
            if leaf is not None and (id(leaf) in mine or id(leaf) in theirs):
                first.setdefault(id(leaf) in mine, depth)
            if len(first) == 2 or len(seen) > _MOST_NODES:
                break
            for source, _ in node.next_functions:
                if source is not None and source not in seen:
                    seen.add(source)
                    nodes.append((source, depth + 1))
        self._through = len(first) == 2 and first[True] < first[False]


def _stepped_between(view: View, book: Book, old: Part, new: Part) -> Any:
    """Another optimizer that has stepped between two backward calls."""
    for fact in reversed(view.journal.steps):
        if fact.clock < old.call.clock:
            return None
        optimizer = fact.optimizer()
        if fact.clock < new.call.clock and optimizer is not None and optimizer is not book.ref():
            return optimizer
    return None
