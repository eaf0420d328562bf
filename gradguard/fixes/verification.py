"""Which fixes are tried, in which order, and what a trial proves: what is pure about `gradguard.runtime.trials`.

A trial runs the program again with a fix in its files. Its outcome is judged here: the fix is verified, it has failed, there is a further
fault behind the first, or the trial could not show anything, which is never held against the fix.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gradguard.core.diagnosis import Diagnosis, Fix, Safety, Verdict, Verification
from gradguard.fixes.application import changes_of

BEHIND = 3  # faults that are followed up, the first among them
_MORE_STEPS = 5  # that a trial runs after the one that failed
_LOUD = ("error", "warning")
_ORDER: dict[Verdict, int] = {"verified": 0, "not tried": 1, "failed": 2}
_RISK: dict[Safety, int] = {"safe": 0, "unsafe": 1, "manual": 2}
_LISTED = 3

Ending = Literal["end", "enough", "time", "error", "gone"]


@dataclass
class Outcome:
    """What a trial has seen.

    Attributes:
        ending: the program's own end; enough steps; the time was up; an exception; or the process is gone without a word.
        steps: of the busiest optimizer.
        backwards: calls of backward().
        diagnoses: what the guard said, with the user's own paths.
        error: type and first line of the exception, or what else is known of the end.
        refused: what the program was kept from: writes outside of the trial's folder, connections.
        left_out: what was not copied.
        unkept: what could not be kept apart.
        without_gradient: trainable parameters of optimizers that have stepped, which got none.
        nonfinite: those whose last gradient was not finite.
    """

    ending: Ending = "gone"
    steps: int = 0
    backwards: int = 0
    diagnoses: list[Diagnosis] = field(default_factory=list)
    error: str | None = None
    error_type: str | None = None
    refused: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    unkept: list[str] = field(default_factory=list)
    without_gradient: list[str] = field(default_factory=list)
    nonfinite: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def progress(self) -> int:
        """Steps; of a program without an optimizer, backward calls."""
        return self.steps or self.backwards

    @property
    def length(self) -> str:
        """How far it came, in words."""
        number, what = (self.steps, "step") if self.steps or not self.backwards else (self.backwards, "backward call")
        return f"{number} {what}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class Ruling:
    """What an outcome says of a fix; `behind` is the fault to go on with."""

    verdict: Verdict
    why: str
    behind: Diagnosis | None = None


def candidates(diagnosis: Diagnosis) -> list[Fix]:
    """The fixes that can be tried, the preferred one first."""
    return [fix for fix in diagnosis.fixes if fix.patch is not None and fix.files]


def own_change(diagnosis: Diagnosis) -> Fix | None:
    """The first fix that changes the culprit's own line, or the one that made it do what it does, and so tells it from other lines."""
    spans = [each for each in (diagnosis.culprit, *diagnosis.related) if each is not None and each.role in ("culprit", "declared")]
    for fix in candidates(diagnosis):
        paths = {file.name: file.path for file in fix.files}
        for name, changes in changes_of(fix.patch or "").items():
            lines = {line for change in changes for line in range(change.start + 1, change.start + 1 + max(1, len(change.old)))}
            if any(paths.get(name) == os.path.realpath(span.file) and lines & {*range(span.line, span.end_line + 1)} for span in spans):
                return fix
    return None


def settles(outcome: Outcome, diagnosis: Diagnosis) -> Diagnosis | None:
    """The same incident with a line that is certain, from the program as it is, run again with every step traced."""
    raised = (found for found in outcome.diagnoses if found.torch_message is not None and found.code[:3] == diagnosis.code[:3])
    return next((found for found in raised if found.culprit is not None and found.confidence == "certain"), None)


def is_doubtful(diagnosis: Diagnosis) -> bool:
    """Whether trials may tell which line is the bug of an exception."""
    return diagnosis.torch_message is not None and (diagnosis.confidence != "certain" or diagnosis.culprit is None)


def is_still_told(outcome: Outcome, diagnosis: Diagnosis) -> bool:
    """Whether the fault is there as before, at whichever line it is told."""
    return any(found.code == diagnosis.code and found.severity in _LOUD for found in outcome.diagnoses)


def repairs_step(outcome: Outcome, diagnosis: Diagnosis) -> bool:
    """Whether the step that failed has run, whatever else is wrong with the program."""
    ran = outcome.progress >= (diagnosis.step or 1) and outcome.ending not in ("error", "gone")
    return ran and not is_still_told(outcome, diagnosis) and not outcome.without_gradient


def steps_needed(diagnosis: Diagnosis) -> int:
    """How many steps a trial has to run: those up to the fault, and some."""
    return (diagnosis.step or 1) + _MORE_STEPS


def judge(outcome: Outcome, diagnosis: Diagnosis, known: Sequence[Diagnosis] = ()) -> Ruling:
    """What an outcome says of a fix for `diagnosis`.

    Args:
        known: what was said of the program as it is; a finding of these is not the fix's doing.
    """
    loud = [found for found in outcome.diagnoses if found.severity in _LOUD]
    for found in loud:
        if _same(found, diagnosis):
            return Ruling("failed", f"{diagnosis.code} is still reported{_at(found)}")
    new = [found for found in loud if not any(_same(found, each) for each in known)]
    if new:
        behind = max(new, key=lambda found: found.severity == "error")
        return Ruling("failed", f"{behind.code} is reported{_at(behind)} after {outcome.length}", behind)
    if outcome.ending in ("error", "gone"):
        return _ended(outcome)
    if outcome.ending == "time" and outcome.progress <= (diagnosis.step or 1):
        seconds = f"{outcome.seconds:.0f} s"
        return Ruling("not tried", f"the trial came to {outcome.length} in {seconds}; the fault showed in step {diagnosis.step or 1}")
    if outcome.nonfinite:
        return Ruling("failed", f"the last gradient of {_listed(outcome.nonfinite)} is not finite")
    if outcome.without_gradient:
        return Ruling("failed", f"{_listed(outcome.without_gradient)} got no gradient in {outcome.length}")
    whole = ", to the program's end" if outcome.ending == "end" else ""
    every = "every trainable parameter got a finite gradient, and " if outcome.steps else ""
    return Ruling("verified", f"it ran {outcome.length}{whole}; {every}{diagnosis.code} is not reported any more")


def _ended(outcome: Outcome) -> Ruling:
    """A program that stopped with an exception: is that the fix's doing, or the trial's?"""
    if outcome.error_type in ("PermissionError", "ConnectionError") and outcome.refused:
        return Ruling("not tried", f"the program needs what a trial must not do: {outcome.refused[0]}")
    if outcome.error_type == "FileNotFoundError" and outcome.left_out:
        return Ruling("not tried", f"the program needs a file that a trial does not have: {outcome.error}")
    if outcome.ending == "gone":
        return Ruling("not tried", f"the trial's process ended without a word ({outcome.error})")
    return Ruling("failed", f"it ends with {outcome.error} after {outcome.length}")


def _same(found: Diagnosis, other: Diagnosis) -> bool:
    """Whether both are of one fault: the same rule at the same code. Line numbers move with a patch; text and function do not."""
    if found.code != other.code:
        return False
    one, two = (each.place for each in (found, other))
    if one is None or two is None:
        return one is two
    return os.path.realpath(one.file) == os.path.realpath(two.file) and (one.function, one.text) == (two.function, two.text)


def _at(found: Diagnosis) -> str:
    place = found.place
    return "" if place is None else f" at {os.path.basename(place.file)}:{place.line}"


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(f"`{name}`" for name in names[:_LISTED]) + rest


def least_safe(fixes: Sequence[Fix]) -> Safety:
    """The safety of several changes together."""
    return max((fix.safety for fix in fixes), key=_RISK.__getitem__)


def reordered(diagnosis: Diagnosis, verified: dict[int, Verification]) -> Diagnosis:
    """The diagnosis with what was found out about its fixes, by their index: a verified one comes first, one that failed last."""
    fixes = [fix.model_copy(update={"verified": verified[i]}) if i in verified else fix for i, fix in enumerate(diagnosis.fixes)]
    return diagnosis.model_copy(update={"fixes": sorted(fixes, key=lambda fix: _ORDER[fix.verified.verdict])})
