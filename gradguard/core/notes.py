"""What the parts of a run remember from one moment to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Kind = TypeVar("Kind")


def _no_settings(rule: Any) -> Any:
    raise LookupError("these notes belong to no run, and have no settings")


class Notes:
    """One object of each kind: whoever keeps notes has a class of its own for them. They hold tensors weakly, or not at all.

    Attributes:
        options: gives a rule's `Options` as the run's settings have them.
    """

    def __init__(self, options: Callable[[Any], Any] = _no_settings) -> None:
        self.options = options
        self._kept: dict[type, Any] = {}

    def __getitem__(self, kind: type[Kind]) -> Kind:
        """The note of a kind, made without arguments where there is none."""
        found = self._kept.get(kind)
        if found is None:
            found = self._kept[kind] = kind()
        return found

    def __contains__(self, kind: type) -> bool:
        return kind in self._kept

    def get(self, kind: type[Kind]) -> Kind | None:
        """The note of a kind, where there is one."""
        return self._kept.get(kind)

    def put(self, note: object) -> None:
        """Keeps a note in place of the one of its kind."""
        self._kept[type(note)] = note

    def pop(self, kind: type[Kind]) -> Kind | None:
        """The note of a kind, which is forgotten."""
        found: Kind | None = self._kept.pop(kind, None)
        return found
