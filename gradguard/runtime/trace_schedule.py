"""Which steps are traced: the adaptive part of a level.

Structural bugs show in the first steps or right after something changed, so those are traced and everything after costs
next to nothing (levels `standard`). What may have changed is read from signals that cost nothing: a module switched
between train and eval, an optimizer never seen before, and the number of graph nodes a step made, which is what
requires_grad flips, branches and validation passes alter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradguard.torch_compat.private_api import sequence_number

if TYPE_CHECKING:
    from gradguard.config.settings import Settings

# Programs whose every step differs (variable lengths, rare heads) must not be traced for ever: beyond these many steps
# traced for a change, one in a thousand steps may still be.
_CHANGE_BUDGET = 24
_SIZES_REMEMBERED = 64


class Depth:
    """Decides at each step boundary whether the coming step gets the full set of probes.

    Args:
        settings: the `trace` section rules.
    """

    def __init__(self, settings: Settings) -> None:
        self._trace = settings.trace
        self.steps = 0
        self._left = settings.trace.first_steps if settings.trace.mode == "adaptive" else 0
        self._spent = 0
        self.sequence = 0  # where the step began; while paused, less the number at the pause
        self.sizes: set[int] = set()  # numbers of graph nodes that steps have made
        self.changed = False

    def next_step(self) -> bool:
        """A step begins: whether it is traced."""
        self.steps += 1
        mode = self._trace.mode
        if mode == "always":
            return True
        if mode == "adaptive":
            self._notice_size()
            if self.changed:
                self.changed = False
                self._extend(self._trace.after_change)
            if self._trace.every and self.steps % self._trace.every == 0:
                self._left = max(self._left, 1)
        if self._left > 0:
            self._left -= 1
            return True
        return False

    @property
    def adaptive(self) -> bool:
        """Whether some steps are traced and others not."""
        return self._trace.mode == "adaptive"

    @property
    def heeds_sizes(self) -> bool:
        """Whether the number of nodes a step makes can have the next ones traced: not where every step differs, and the budget is spent."""
        return self.adaptive and self._affords(self._trace.after_change)

    def ahead(self) -> int:
        """Steps from here on of which none is traced, as long as nothing changes."""
        if self._left > 0 or self._trace.mode == "always" or (self.changed and self.heeds_sizes):
            return 0
        every = self._trace.every if self.adaptive else 0
        return every - 1 - self.steps % every if every else 1_000_000

    def incident(self) -> None:
        """A step went wrong: the next ones are looked at closely."""
        self._left = max(self._left, self._trace.after_incident)

    def next_part(self) -> bool:
        """A backward call has ended where no optimizer ends the steps: whether what follows is traced, as after an incident."""
        traced = self._left > 0
        self._left -= traced
        return traced

    def pause(self) -> None:
        """The guard is left: what runs until it is entered again is none of its business."""
        self.sequence -= sequence_number()

    def resume(self) -> None:
        """The guard is entered again."""
        self.sequence += sequence_number()

    def _notice_size(self) -> None:
        """A step ended here: one with a number of graph nodes never seen before means that something changed."""
        now = sequence_number()
        size = now - self.sequence
        self.sequence = now
        if size in self.sizes or size < 0:
            return
        if len(self.sizes) < _SIZES_REMEMBERED:
            self.sizes.add(size)
        if self.steps > self._trace.first_steps + 1:
            self.changed = True

    def _affords(self, steps: int) -> bool:
        return self._spent + steps <= _CHANGE_BUDGET + self.steps // 1000

    def _extend(self, steps: int) -> None:
        if self._affords(steps):
            self._spent += steps
            self._left = max(self._left, steps)
