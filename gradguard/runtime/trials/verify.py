"""Tries the fixes of a diagnosis, one after the other, until one is verified; follows up faults that show behind the first."""

from __future__ import annotations

import difflib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradguard.config.settings import Settings
from gradguard.core.diagnosis import Diagnosis, Fix, PatchedFile, Verification
from gradguard.core.foreign_exceptions import internal_error
from gradguard.fixes.application import PatchError, Text, applied
from gradguard.fixes.diff import heads
from gradguard.fixes.patched_files import hash_of
from gradguard.fixes.verification import (
    BEHIND,
    Outcome,
    Ruling,
    candidates,
    is_doubtful,
    is_still_told,
    judge,
    least_safe,
    own_change,
    reordered,
    repairs_step,
    settles,
    steps_needed,
)
from gradguard.reporting.source_blocks import shown_path
from gradguard.reporting.terminal.layout import one_line
from gradguard.reporting.terminal.progress import Progress
from gradguard.reporting.wording import title_at
from gradguard.runtime.rerun.reachable_state import aloud
from gradguard.runtime.trials.order import VARIABLE
from gradguard.runtime.trials.trial import Launch, NoTrialError, run_trial

SECONDS = 120.0  # of one trial
_MOST_TRIALS = 8  # of one diagnosis
_MOST_SECONDS = 600.0
_CONTEXT = 1
_TRACED = "the step failed untraced; the program was run again, every step traced, to see which line it is"


class Verifier:
    """Verifies diagnoses of one program.

    Args:
        launch: how it was started.
        settings: those of the guard that made the diagnoses.
        seconds: the time limit of one trial.
    """

    def __init__(self, launch: Launch, settings: Settings, seconds: float = SECONDS) -> None:
        self._launch = launch
        self._settings = settings
        self._seconds = seconds
        self._left = _MOST_TRIALS
        self._until = 0.0

    def verified(self, diagnosis: Diagnosis, known: Sequence[Diagnosis] = ()) -> Diagnosis:
        """The diagnosis with a verdict on its fixes, a verified one first.

        Args:
            known: what else was said of the program.
        """
        found: dict[int, Verification] = {}
        behind: dict[int, tuple[Diagnosis, dict[str, Text], dict[str, Text]]] = {}
        self._left, self._until = _MOST_TRIALS, time.monotonic() + _MOST_SECONDS
        try:
            self._launch.check()
        except NoTrialError as error:
            return reordered(diagnosis, dict.fromkeys(_tried(diagnosis), Verification(why=str(error))))
        try:
            diagnosis = self._settled(diagnosis, known)
        except internal_error(NoTrialError, PatchError, OSError):  # it stays as doubtful as it is
            pass
        tried = _tried(diagnosis)
        for i, fix in tried.items():
            if fix.verified.verdict == "verified":  # by what settled the line
                return reordered(diagnosis, {i: fix.verified})
            try:
                texts = _texts(fix)
                patched = _with(fix, texts)
                outcome, ruling = self._trial(patched, diagnosis, known, steps_needed(diagnosis))
            except (NoTrialError, PatchError) as error:
                found[i] = Verification(why=str(error))
                continue
            except internal_error(OSError) as error:
                found[i] = Verification(why=f"the trial could not be made: {error}")
                continue
            found[i] = Verification(verdict=ruling.verdict, steps=outcome.steps, why=_why(ruling, outcome))
            if ruling.verdict == "verified":
                return reordered(diagnosis, found)
            if ruling.behind is not None:
                behind[i] = (ruling.behind, patched, texts)
        for i, (fault, patched, texts) in behind.items():  # none does it alone
            names = {file.path: file.name for file in tried[i].files}
            try:
                further = self._behind(fault, patched, texts, known, [diagnosis], [tried[i]], names)
            except internal_error(NoTrialError, PatchError, OSError):  # what is known of the first stays
                continue
            if further is not None:
                found[i] = further
                break
        return reordered(diagnosis, found)

    def _settled(self, diagnosis: Diagnosis, known: Sequence[Diagnosis]) -> Diagnosis:
        """The diagnosis with the line that is the bug, as far as trials can tell it.

        A step that failed untraced is run again traced: what ran decides. Where that does not tell, the line is sought whose change
        repairs the program alone. It is certain where every line that may be the bug could be changed, the change of no other one
        repairs the program, and those of all the others together do not either.
        """
        if not is_doubtful(diagnosis):
            return diagnosis
        if not diagnosis.traced:
            traced = settles(self._run({}, steps_needed(diagnosis), traced=True), diagnosis)
            if traced is not None:
                return _as_of(diagnosis, traced, notes=[*traced.notes, _TRACED])
        lines = [(each, fix, _texts(fix)) for each in diagnosis.alternatives if (fix := own_change(each)) is not None]
        if len(lines) < 2:
            return diagnosis
        repairing, failing = [], []
        for each, fix, texts in lines:
            outcome = self._run(_with(fix, texts), steps_needed(diagnosis))
            ruling = judge(outcome, each, known)
            if is_still_told(outcome, each):
                failing.append(each)
            elif ruling.verdict == "verified":
                done = Verification(verdict="verified", steps=outcome.steps, why=_why(ruling, outcome))
                repairing.append(reordered(each, {each.fixes.index(fix): done}))
            elif repairs_step(outcome, each):
                repairing.append(each)
        if len(repairing) != 1:
            told = _listed_lines(repairing or [each for each, *_ in lines])
            how = "which of them is the bug cannot be told by trying" if repairing else "none of these changes repairs the step"
            note = f"{told} {'each repair the step when changed alone' if repairing else 'were each changed alone'}: {how}"
            return diagnosis.model_copy(update={"notes": [*diagnosis.notes, note]})
        (culprit,) = repairing
        others = [(fix, texts) for each, fix, texts in lines if each.key != culprit.key]
        needed = len(failing) == len(diagnosis.alternatives) - 1 and self._still_fails(others, culprit)
        note = f"of {len(diagnosis.alternatives)} lines that may be the bug, changing this one alone repairs the step"
        return _as_of(
            diagnosis, culprit, notes=[*culprit.notes, note], confidence="certain" if needed else diagnosis.confidence, traced=True
        )

    def _still_fails(self, changes: Sequence[tuple[Fix, dict[str, Text]]], diagnosis: Diagnosis) -> bool:
        """Whether the fault stays with several changes made at once."""
        whole: dict[str, Text] = {}
        for fix, texts in changes:
            whole = _with(fix, {**texts, **whole})
        return is_still_told(self._run(whole, steps_needed(diagnosis)), diagnosis)

    def _behind(
        self,
        fault: Diagnosis,
        patched: dict[str, Text],
        first: dict[str, Text],
        known: Sequence[Diagnosis],
        repaired: list[Diagnosis],
        made: list[Fix],
        names: dict[str, str],
        said: tuple[str, ...] = (),
    ) -> Verification | None:
        """Repairs a fault behind others as well; None where that does not succeed."""
        if len(repaired) >= BEHIND:
            return None
        for fix in candidates(fault):
            texts = {**{file.path: _read(file.path) for file in fix.files}, **first}
            more = {**names, **{file.path: file.name for file in fix.files}}
            try:
                now = _with(fix, {**texts, **patched})
            except PatchError:
                continue
            needed = max(map(steps_needed, [*repaired, fault]))
            outcome, ruling = self._trial(now, fault, known, needed)
            behind = (*said, f"{title_at(fault)}: {fix.title}")
            if ruling.verdict == "verified" and not any(judge(outcome, each, known).verdict != "verified" for each in repaired):
                diff, files = _combined(texts, now, more)
                why = _why(ruling, outcome)
                return Verification(
                    verdict="verified",
                    steps=outcome.steps,
                    why=why,
                    behind=list(behind),
                    patch=diff,
                    safety=least_safe([*made, fix]),
                    files=files,
                )
            if ruling.behind is not None:
                further = self._behind(ruling.behind, now, texts, known, [*repaired, fault], [*made, fix], more, behind)
                if further is not None:
                    return further
        return None

    def _trial(self, texts: Mapping[str, Text], diagnosis: Diagnosis, known: Sequence[Diagnosis], steps: int) -> tuple[Outcome, Ruling]:
        if self._left <= 0 or time.monotonic() >= self._until:
            return Outcome(), Ruling("not tried", "enough trials were made")
        self._left -= 1
        outcome = self._run(texts, steps)
        return outcome, judge(outcome, diagnosis, known)

    def _run(self, texts: Mapping[str, Text], steps: int, traced: bool = False) -> Outcome:
        seconds = min(self._seconds, max(1.0, self._until - time.monotonic()))
        settings = self._settings
        if traced:
            settings = settings.model_copy(update={"trace": settings.trace.model_copy(update={"mode": "always"})})
        what = f"trying a change of {', '.join(map(shown_path, texts))}" if texts else "running the program again"
        with Progress(f"gradguard: {what}", wanted=settings.verbosity != "quiet"):
            return run_trial(self._launch, {path: text.content for path, text in texts.items()}, settings, steps, seconds)


def _tried(diagnosis: Diagnosis) -> dict[int, Fix]:
    """The fixes that can be tried, by their index."""
    return {i: fix for i, fix in enumerate(diagnosis.fixes) if any(fix is each for each in candidates(diagnosis))}


def _as_of(diagnosis: Diagnosis, told: Diagnosis, **updates: object) -> Diagnosis:
    """The incident as it was, told anew."""
    kept = {name: getattr(diagnosis, name) for name in ("severity", "step", "thread", "rank", "breadcrumbs", "torch_message", "repeats")}
    told = told.model_copy(update={**kept, **updates, "alternatives": []})
    return told.with_evidence(diagnosis.evidence if told.key == diagnosis.key else None)


def _listed_lines(told: Sequence[Diagnosis]) -> str:
    found = sorted((each.place.file, each.place.line) for each in told if each.place is not None)
    places = [f"{os.path.basename(file)}:{line}" for file, line in found]
    return f"{', '.join(places[:-1])} and {places[-1]}" if len(places) > 1 else "".join(places)


def verified_here(diagnosis: Diagnosis, settings: Settings, known: Sequence[Diagnosis]) -> Diagnosis:
    """A diagnosis of this process's own program, verified; where the program cannot be run again, every patch says why."""
    if os.environ.get(VARIABLE) or not is_tried(diagnosis):
        return diagnosis
    try:
        launch = Launch.of_this_process()
    except NoTrialError as error:
        whole = Verification(why=str(error))
        return reordered(diagnosis, {i: whole for i, fix in enumerate(diagnosis.fixes) if fix.patch is not None})
    with aloud():
        announce(diagnosis)
    return Verifier(launch, settings).verified(diagnosis, known)


def is_tried(diagnosis: Diagnosis) -> bool:
    """Whether there is something that trials may tell."""
    return bool(candidates(diagnosis)) or is_doubtful(diagnosis)


def announce(diagnosis: Diagnosis) -> None:
    """Says that it will take a while, or that there is nothing to try."""
    number, minutes = len(candidates(diagnosis)), f"at most {SECONDS / 60:.0f} minutes"
    if is_doubtful(diagnosis):
        what = f"running the program again to see which line it is, and to try its fixes, which takes {minutes} each"
    elif number > 1:
        what = f"trying its {number} fixes until one repairs the program, which takes {minutes} each"
    elif number:
        what = f"trying its fix, which takes {minutes}"
    elif diagnosis.fixes:
        what = "its fix is not tried: it is in words, not a patch"
    else:
        return
    print(one_line(f"gradguard: {title_at(diagnosis)}: {what}"), file=sys.stderr, flush=True)


def _why(ruling: Ruling, outcome: Outcome) -> str:
    aside = [f"not kept apart: {', '.join(outcome.unkept)}"] if outcome.unkept else []
    if ruling.verdict == "verified" and outcome.refused:
        aside.append(f"refused, without consequence: {', '.join(outcome.refused[:3])}")
    return "; ".join([ruling.why, *aside])


def _read(path: str) -> Text:
    return Text.read(Path(path).read_bytes())


def _texts(fix: Fix) -> dict[str, Text]:
    """The files of a fix.

    Raises:
        PatchError: one has changed since.
    """
    texts = {}
    for file in fix.files:
        content = Path(file.path).read_bytes()
        if hash_of(content) != file.sha256:
            raise PatchError(f"{file.name} has changed since it was read")
        texts[file.path] = Text.read(content)
    return texts


def _with(fix: Fix, texts: dict[str, Text]) -> dict[str, Text]:
    return applied(texts, fix.patch or "", {file.name: file.path for file in fix.files})


def _combined(before: Mapping[str, Text], after: Mapping[str, Text], names: Mapping[str, str]) -> tuple[str, list[PatchedFile]]:
    """One diff of all that was changed."""
    diffs, files = [], []
    for path, text in after.items():
        name, old = names[path], before[path]
        diff = "".join(difflib.unified_diff(old.plain, text.plain, *heads(name), n=_CONTEXT))
        if diff:
            diffs.append(diff)
            files.append(PatchedFile(name=name, path=path, sha256=hash_of(old.content)))
    return "".join(diffs), files
