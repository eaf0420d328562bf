"""Findings: what a monitor reports, one dataclass a kind. Each monitor's module defines its own; here is what they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from gradguard.core.diagnosis import Diagnosis
    from gradguard.monitors.optimizer_books import Book


@dataclass(frozen=True, eq=False)
class Finding:
    """Something that needs a rule's judgement; plain facts and weak references.

    Attributes:
        book: the optimizer concerned, if it is one's.
        CODE: the rule's.
        ROUTINE: whether it is a look that every healthy program gets, and nothing odd yet.
    """

    CODE: ClassVar[str] = ""
    ROUTINE: ClassVar[bool] = False

    book: Book | None

    @property
    def code(self) -> str:
        """The rule to ask."""
        return self.CODE


class TraceNext(Finding):
    """Nothing to judge yet: the next steps are to be traced."""


@dataclass(frozen=True, eq=False)
class Confirmed(Finding):
    """A diagnosis made while names were at hand, which has held to the end of training."""

    diagnosis: Diagnosis

    @property
    def code(self) -> str:
        return self.diagnosis.code
