"""When a step is calm: what the rules say of the steps in which they need nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradguard.core.notes import Notes
    from gradguard.instrumentation.event_buffer import Ahead, Place
    from gradguard.rules.base import Rule


class Calm:
    """What has to be asked of the rules before a stretch of calm steps; made once a run.

    Args:
        rules: all that look at untraced steps.
    """

    PART = "fast path"

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self.possible = all(rule.idle is not None or rule.ahead is not None for rule in rules)
        self._idle: tuple[Callable[[Notes], bool], ...] = tuple(dict.fromkeys(rule.idle for rule in rules if rule.idle is not None))
        self.ahead: tuple[Ahead, ...] = tuple(dict.fromkeys(rule.ahead for rule in rules if rule.ahead is not None))

    def begins(self, notes: Notes) -> bool:
        """Whether no rule has any business in the step that begins, as far as that can be known now."""
        return self.possible and all(idle(notes) for idle in self._idle)

    def calls(self, notes: Notes) -> dict[Place, int]:
        """How many backward calls at each place may go by with no more than a look at their loss."""
        found: dict[Place, int] | None = None
        for each in self.ahead:
            calls = each.calls(notes)
            found = calls if found is None else {place: min(count, calls[place]) for place, count in found.items() if place in calls}
        return found or {}
