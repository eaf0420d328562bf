"""`gradguard run --verify`: what is done once the program is over, and before what it raised is shown."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

from gradguard.core import ranks
from gradguard.core.diagnosis import Diagnosis
from gradguard.core.errors import GradGuardError
from gradguard.core.foreign_exceptions import internal_error
from gradguard.fixes.verification import candidates
from gradguard.reporting.jsonl import JsonlReport
from gradguard.reporting.terminal.layout import clean
from gradguard.reporting.terminal.render import render_fixes, render_for_error, terminal_width
from gradguard.runtime.diagnoser import witnesses
from gradguard.runtime.guard import Guard
from gradguard.runtime.trials.trial import Launch
from gradguard.runtime.trials.verify import Verifier, announce


class VerifiedRun:
    """Collects what any guard of the process says, and verifies it in the end.

    Args:
        launch: how the program was started.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._said: list[Diagnosis] = []
        self._guard: Guard | None = None

    def around(self, make_guard: Callable[[], Guard]) -> Callable[[], Guard]:
        """Makes the guard of the program, and listens."""

        def made() -> Guard:
            self._guard = make_guard()
            witnesses.append(self._said.append)
            return self._guard

        return made

    def finish(self, error: BaseException | None) -> None:
        """The program is over."""
        if self._guard is None or isinstance(error, KeyboardInterrupt):
            return
        witnesses.clear()
        verifier = Verifier(self._launch, self._guard.settings)
        raised = next((each for each in _chain(error) if isinstance(each, GradGuardError)), None)
        report = self._guard.diagnoser.report
        said = {diagnosis.key: diagnosis for diagnosis in self._said if diagnosis.severity in ("error", "warning")}
        for diagnosis in said.values():
            if not candidates(diagnosis):
                continue
            announce(diagnosis)
            others = [each for each in said.values() if each is not diagnosis]
            try:
                verified = verifier.verified(diagnosis, others)
            except KeyboardInterrupt:
                print("gradguard: interrupted; the other fixes are not tried", file=sys.stderr)
                return
            text = render_for_error(verified)
            if report is not None and ranks.rank() is None:
                _revise(report, diagnosis, verified, text)
            if raised is not None and raised.diagnosis.key == diagnosis.key:
                raised.diagnosis = verified
                raised.args = (text,)
            else:
                print(clean(render_fixes(verified, width=terminal_width())), file=sys.stderr)


def _revise(report: JsonlReport, old: Diagnosis, new: Diagnosis, text: str) -> None:
    try:
        report.revise(old, new, text)
    except internal_error(OSError, ValueError) as error:
        print(f"gradguard: the report {os.fspath(report.path)} does not say what was verified ({error})", file=sys.stderr)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
