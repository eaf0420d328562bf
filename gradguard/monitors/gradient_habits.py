"""What an optimizer's gradients look like after each of its steps: watched by the counts of their writes while nothing else is followed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from gradguard.monitors.tensor_state import version_of

_MOST = 8  # forms of a step, beyond which a program has no habit
_ALARMS = 3

# Of each watched parameter: how much further the version of its gradient is than after the step before; None without a gradient.
Form = tuple[int | None, ...]


class Habit:
    """The forms that an optimizer's steps have had while its gradients were followed.

    A gradient that is cleared between two steps and one that is added to differ in how often it is written: a new tensor has as many
    writes as the one before it, one that is zeroed in place has two more a step, one that is only added to has one more.

    Attributes:
        left_at: the optimizer's step at which a form was first met that none had had before.
    """

    __slots__ = ("_alarms", "_known", "_last", "_refs", "left_at")

    def __init__(self) -> None:
        self._refs: tuple[weakref.ref[Any], ...] = ()
        self._last: tuple[int, ...] = ()
        self._known: set[Form] = set()
        self._alarms = _ALARMS
        self.left_at = 0

    def watch(self, parameters: Sequence[weakref.ref[Any]]) -> None:
        """Watches these from here on; what is known of others does not hold for them."""
        refs = tuple(parameters)
        if refs != self._refs:
            self._refs, self._last = refs, ()
            self._known.clear()

    def learn(self) -> None:
        """A step has been taken while gradients are followed."""
        if not self._alarms:
            return
        form, versions = self._form()
        if self._last:
            self._known.add(form)
        self._last = versions
        if len(self._known) > _MOST:
            self._alarms = 0

    def unlike(self) -> bool:
        """Whether a step that has been taken unfollowed has left the gradients as none has before."""
        if not self._alarms:
            return False
        form, versions = self._form()
        if form not in self._known:
            return True
        self._last = versions
        return False

    def leave(self, step: int) -> bool:
        """The same, once for each form; notes the step."""
        if not self.unlike():
            return False
        form, self._last = self._form()
        self._known.add(form)
        self._alarms -= 1
        self.left_at = step
        return True

    def _form(self) -> tuple[Form, tuple[int, ...]]:
        form: list[int | None] = []
        versions: list[int] = []
        for i, ref in enumerate(self._refs):
            grad = None if (parameter := ref()) is None else parameter.grad
            version = 0 if grad is None else version_of(grad)
            form.append(None if grad is None else version - (self._last[i] if self._last else 0))
            versions.append(version)
        return tuple(form), tuple(versions)
