"""Wording that several rules of this family share."""

from __future__ import annotations

from typing import Any

from gradguard.core.foreign_exceptions import internal_error


def shape_of(tensor: Any) -> list[int] | None:
    """A tensor's sizes; None for those that have none (nested tensors)."""
    try:
        return [int(n) for n in tensor.shape]
    except internal_error():
        return None


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
