"""Which steps are traced: the adaptive part of a level."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradguard.session import Session


class Depth:
    """Decides at each step boundary whether the coming step gets the full set of probes."""

    def __init__(self, level: str) -> None:
        self.level = level

    def wants_trace(self, session: Session) -> bool:
        """Whether the step that begins now is traced."""
        return self.level in ("standard", "strict", "forensic")
