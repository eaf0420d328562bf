"""`gradguard run --verify`: what is done once the program is over, and before what it raised is shown."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from gradguard.core import ranks
from gradguard.core.diagnosis import Diagnosis
from gradguard.core.errors import GradGuardError
from gradguard.core.foreign_exceptions import internal_error
from gradguard.reporting.jsonl import JsonlReport
from gradguard.reporting.terminal.layout import clean
from gradguard.reporting.terminal.render import render_fix_line, render_for_error, render_verified, terminal_width
from gradguard.runtime.diagnoser import leave_verification, witnesses
from gradguard.runtime.guard import Guard
from gradguard.runtime.trials.trial import Launch
from gradguard.runtime.trials.verify import Verifier, announce, is_tried


class VerifiedRun:
    """Collects what any guard of the process says, and verifies it in the end.

    Args:
        launch: how the program was started.
        guard: the one around the program.
    """

    def __init__(self, launch: Launch, guard: Guard) -> None:
        self._launch = launch
        self._said: list[Diagnosis] = []
        self._guard = guard
        leave_verification()
        witnesses.append(self._said.append)

    def finish(self, error: BaseException | None) -> None:
        """The program is over."""
        if isinstance(error, KeyboardInterrupt):
            return
        if not isinstance(error, Exception):
            self._guard.run.end()  # what only a whole run shows is verified as well
        witnesses.clear()
        verifier = Verifier(self._launch, self._guard.settings)
        raised = next((each for each in _chain(error) if isinstance(each, GradGuardError)), None)
        report, page = self._guard.diagnoser.report, self._guard.diagnoser.page
        quiet = self._guard.settings.verbosity == "quiet"
        said = {diagnosis.key: diagnosis for diagnosis in self._said if diagnosis.severity in ("error", "warning")}
        for diagnosis in said.values():
            if not quiet:
                announce(diagnosis)
            if not is_tried(diagnosis):
                continue
            others = [each for each in said.values() if each is not diagnosis]
            try:
                verified = verifier.verified(diagnosis, others)
            except KeyboardInterrupt:
                print("gradguard: interrupted; the other fixes are not tried", file=sys.stderr)
                return
            text = render_for_error(verified)
            if report is not None and ranks.rank() is None:
                _revise(report, diagnosis, verified, text)
            if page is not None:
                try:
                    page.revise(diagnosis, verified)
                except internal_error() as error:
                    print(f"gradguard: the page {os.fspath(page.path)} does not say what was verified ({error})", file=sys.stderr)
            if raised is not None and raised.diagnosis.key == diagnosis.key:
                raised.diagnosis = verified
                raised.args = (text,)
            elif quiet:
                if verified.fixes:
                    print(render_fix_line(verified), file=sys.stderr)
            else:
                print(clean(render_verified(diagnosis, verified, width=terminal_width())), file=sys.stderr)


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
