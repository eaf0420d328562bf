"""Whether the graphs of old steps live on.

Now and then a backward call hangs a small object on some nodes of its graph (`Node.metadata`, official) and keeps a weak
reference to it: as long as any of those nodes lives, so does the object. Nothing is kept alive, and no memory is searched
until old graphs are seen to pile up.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradguard.monitors.findings import Finding
from gradguard.monitors.monitor import Backward, Monitor

if TYPE_CHECKING:
    from gradguard.monitors.view import View

MOST_TAGS = 48
RAREST = 128  # backward calls from one tag to the next
PATH = 256  # nodes of a graph looked at
TAGGED = 12  # of them tagged
KEY = "gradguard"


def tag_due(backward: int) -> bool:
    """Whether this backward call's graph is tagged: one in eight of the first, one in 128 of a long run."""
    return not backward & (7 if backward < 128 else 15 if backward < 320 else 63 if backward < 1_024 else RAREST - 1)


@dataclass(frozen=True, eq=False)
class GraphsRetained(Finding):
    """The graphs of old steps live on."""

    CODE = "GG608"

    count: int
    since: int
    step: int
    tags: weakref.WeakSet[Tag]  # of the graphs counted: another run's may live as well


class Tag:
    """Dies with the last node it hangs on."""

    __slots__ = ("__weakref__", "backward", "step")

    def __init__(self, step: int, backward: int) -> None:
        self.step = step
        self.backward = backward


class Retained(Monitor):
    """The tags of a run."""

    PART = "watch of graphs kept alive"
    ASLEEP = True

    def __init__(self) -> None:
        self.tags: list[weakref.ref[Tag]] = []
        self.said = 0
        self._turn = 0
        self._last = 0  # old ones alive when last counted

    def alive(self) -> list[Tag]:
        """The tags whose graphs live, oldest first."""
        return [tag for ref in self.tags if (tag := ref()) is not None]

    def on_backward(self, event: Backward, view: View) -> Sequence[Finding]:
        if not tag_due(view.backwards):
            return ()
        found = self._count(view.steps, view.options("GG608"))
        self._tag(view.steps, view.backwards, event.roots)
        return found

    def _count(self, step: int, options: Any) -> Sequence[Finding]:
        """Counts the older graphs that live; `options` say at which age, and from how many on, that is odd."""
        found: Sequence[Finding] = ()
        old = [tag for tag in self.alive() if step - tag.step >= options.age]
        if len(old) >= options.graphs and len(old) > self._last and self.said < 3:
            spread = old[-1].step - old[0].step
            if spread >= 3 * options.age:
                self.said += 1
                found = (GraphsRetained(None, len(old), old[0].step, step, weakref.WeakSet(old)),)
        self._last = len(old)
        return found

    def _tag(self, step: int, backward: int, roots: tuple[Any, ...]) -> None:
        """Tags a graph that backward has just gone through."""
        self.tags = [ref for ref in self.tags if ref() is not None][-MOST_TAGS:]
        node = roots[0].grad_fn if roots and getattr(roots[0], "grad_fn", None) is not None else None
        if node is None:
            return
        tag = Tag(step, backward)
        self.tags.append(weakref.ref(tag))
        path: list[Any] = []
        self._turn += 1
        turn = self._turn * 2654435761
        while node is not None and len(path) < PATH:
            following = [each for each, _ in node.next_functions if each is not None]
            if not following:
                break  # AccumulateGrad lives as long as any graph does
            path.append(node)
            turn = (turn * 1103515245 + 12345) & 0x7FFFFFFF
            inner = [each for each in following if any(f is not None and f.next_functions for f, _ in each.next_functions)]
            inner = inner or [each for each in following if each.next_functions]  # a parameter's view leads nowhere
            node = inner[(turn >> 16) % len(inner)] if inner else None
        for i, each in enumerate(path):
            if len(path) <= TAGGED or i % (len(path) // TAGGED) == 0 or i == len(path) - 1:
                each.metadata[KEY] = tag
