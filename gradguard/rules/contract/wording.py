"""Wording that several rules of this family share."""

from __future__ import annotations

from gradguard.analysis.incident import Incident
from gradguard.core.diagnosis import SourceSpan


def a_shape(shape: list[int] | None) -> str:
    """`a tensor of shape [3, 4]`, `a vector of 3`, `one number`."""
    if shape is None:
        return "a tensor"
    if not shape or shape == [1]:
        return "one number"
    return f"a vector of {shape[0]}" if len(shape) == 1 else f"a tensor of shape {shape}"


def untraced_note(what: str) -> str:
    """Says what was read from the source only."""
    return (
        f"This step was not traced: {what} was found by reading the source. `level: strict` (GRADGUARD_LEVEL=strict) traces every "
        "step and names it for certain."
    )


def count_word(number: int, noun: str) -> str:
    """`1 gradient`, `2 gradients`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def backward_called(incident: Incident) -> list[SourceSpan]:
    """The line that called backward, where that is what failed."""
    place = incident.place if incident.where in ("backward", "grad") else None
    return [] if place is None else [place.span("backward was called here", "backward")]
