"""The one place where a path to parameters was cut, told for the rules that miss their gradients."""

from __future__ import annotations

from typing import NamedTuple

from gradguard.analysis.history.cut_origins import Origin
from gradguard.analysis.places.sites import UNNAMED, short
from gradguard.core.diagnosis import Fix, SourceSpan
from gradguard.rules.gradient_path import lost_path, patching, read_twice, wording
from gradguard.rules.gradient_path.read_twice import Twice, of_calls

__all__ = ["CutOff", "of_calls", "the_cut"]

_SELECTING = ("topk", "sort", "argsort")


class CutOff(NamedTuple):
    """What the rules about lost paths say of a cut: its place, what belongs to it, one clause, and the repair."""

    culprit: SourceSpan | None
    related: list[SourceSpan]
    clause: str
    fix: Fix


def the_cut(found: list[Origin], twice: Twice | None = None, whose: str = "the rest") -> CutOff | None:
    """Of several origins, none is known to be the one.

    Args:
        twice: where the loss of another optimizer reads what was cut off, too.
        whose: what is to be trained, in words.
    """
    if len(found) != 1 or found[0].place is None:
        return None
    reads = None if twice is None else read_twice.told(found[0], twice, whose)
    if reads is not None:
        return CutOff(*reads)
    culprit, related = lost_path.story(found[0])
    if twice is not None:
        return CutOff(culprit, related, wording.why(found[0], "what it computes"), read_twice.without_cut(found[0], whose))
    fix = _weighing(found[0]) or patching.with_patch(wording.fix(found[0], UNNAMED), found[0])
    return CutOff(culprit, related, wording.why(found[0], "what it computes"), fix)


def _weighing(origin: Origin) -> Fix | None:
    """Indices that only select what goes on into the loss: their scores have to go with it."""
    if not (origin.discrete and (origin.output or origin.func in _SELECTING)):
        return None
    index, scores = wording.result_name(origin), short(origin.inner, 32) if origin.inner else "the scores"
    chosen = f"`{index}` selects" if index else "is selected"
    return Fix(
        title=f"Weigh what {chosen} with `{scores}` at the same places, so that the loss depends on them",
        safety="manual",
        detail="Such as `x[index] * scores[index]`: which one is chosen has no derivative, how much it counts has one.",
    )
