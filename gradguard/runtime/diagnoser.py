"""The diagnoser of a guard: asks rules about an incident, and does with a diagnosis what the policy says."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from gradguard.analysis.incident import Incident
from gradguard.config.settings import Settings, wanted_color
from gradguard.core import ranks
from gradguard.core.diagnosis import Diagnosis
from gradguard.core.errors import GradGuardError, error_type, mark_seen
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import attributes
from gradguard.fixes.patched_files import completed
from gradguard.instrumentation.fault_barrier import say
from gradguard.reporting.jsonl import JsonlReport
from gradguard.reporting.terminal.layout import one_line
from gradguard.reporting.terminal.render import render_for_error, render_verified
from gradguard.reporting.tracebacks import shorten, show_if_uncaught, take_back_hook
from gradguard.rules.base import Rule
from gradguard.rules.registry import rules_for
from gradguard.runtime.recent_events import recent_events
from gradguard.runtime.rerun.reachable_state import aloud
from gradguard.runtime.run import Run
from gradguard.torch_compat.private_api import OtherRanksNeeded, this_rank_only

if TYPE_CHECKING:
    from gradguard.reporting.html.html_report import HtmlReport

_LOGGER = logging.getLogger("gradguard")
# called with every diagnosis that any guard of this process makes known, before it is
witnesses: list[Callable[[Diagnosis], None]] = []
_verified_in_the_end: list[bool] = []


def leave_verification() -> None:
    """From now on no guard of this process tries fixes: `gradguard run --verify` does, once the program is over."""
    _verified_in_the_end.append(True)


class FaultHandler(Protocol):
    """Where faults of rules go: the session of the thread."""

    @property
    def lookout(self) -> AbstractContextManager[Any]: ...

    def fault(self, error: BaseException, rules: tuple[Rule, ...] = (), lasting: bool = True) -> None: ...


class Diagnoser:
    """From an incident to what is raised, warned of, logged and written to the report.

    Args:
        settings: the guard's.

    Attributes:
        report: where diagnoses are written, one JSON object each; None where nowhere.
        page: the page they are drawn on; None where there is none.
        held: the diagnoses of a step that may be run again, which are not said before it has been (`rerun.guarded_step`).
        aside: a note on every diagnosis of a step that is run again.
        launched: whether `gradguard run` shows what leaves the program itself.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.report = None if settings.report is None else JsonlReport(settings.report)
        self.page: HtmlReport | None = None
        if settings.html is not None:
            from gradguard.reporting.html.html_report import HtmlReport  # late: few runs write a page

            self.page = HtmlReport(settings.html)
        self.held: list[tuple[Diagnosis, Exception]] | None = None
        self.aside: str | None = None
        self.launched = False
        self._found: deque[Diagnosis] = deque(maxlen=1_000)
        self._unwritable: list[JsonlReport | HtmlReport] = []  # could not be written, which was said

    @property
    def found(self) -> list[Diagnosis]:
        """The last 1,000 diagnoses, oldest first."""
        return list(self._found)

    def failed(self, incident: Incident, run: Run, faults: FaultHandler) -> None:
        """Raises the diagnosis of an exception in its place, if a rule understands it and the policy says so.

        Raises:
            GradGuardError: of the original's type too, with the original as its cause.
        """
        __tracebackhide__ = True
        error = incident.error
        if error is None or attributes(error).get("__gradguard_seen__", False):
            return
        run.depth.incident()
        rules = tuple(rule for rule in rules_for("error") if run.asks(rule, raised=True))
        diagnosis = self._diagnosis(rules, incident, faults)
        if diagnosis is None or _suppressed(diagnosis, incident, run):
            return
        action = run.policy.action_for(diagnosis, raised=True)
        if action == "raise":
            diagnosis = self._with_evidence(diagnosis, incident, run)
            if self.held is not None and isinstance(error, Exception):
                self.held.append((diagnosis, error))  # `step` looks closer before anything is said
                return
            diagnosis = self.verified(diagnosis)
            text = self.record(diagnosis, faults)
            run.raised[diagnosis.title()] += 1
            self.announce()
            raise error_type(type(error))(text, diagnosis) from error
        mark_seen(error)
        self._tell(diagnosis, action, incident, run, faults)

    def check(self, rules: tuple[Rule, ...], incident: Incident, run: Run, faults: FaultHandler) -> None:
        """Asks rules for silent bugs; says what they find.

        Raises:
            GradGuardError: the policy says so (levels strict and forensic).
            GradGuardWarning: the user's warning filters turn warnings into errors.
        """
        __tracebackhide__ = True
        repeats = run.repeats
        for rule in rules:
            known = None
            with faults.lookout:
                known = repeats.again(rule, incident)
            if known is not None:
                run.speaker.count(known)
                continue
            diagnosis = self._diagnosis((rule,), incident, faults)
            if diagnosis is None or _suppressed(diagnosis, incident, run):
                with faults.lookout:
                    repeats.unlearn(rule, incident)
                continue
            if not incident.traced:
                run.depth.incident()
            action = run.policy.action_for(diagnosis, raised=False)
            if action == "raise":
                diagnosis = self._with_evidence(diagnosis, incident, run).model_copy(update={"severity": "error"})  # it ends the run
                diagnosis = self.verified(diagnosis)
                run.raised[diagnosis.title()] += 1
                self.announce()
                raise GradGuardError(self.record(diagnosis, faults), diagnosis)
            self._tell(diagnosis, action, incident, run, faults)
            if run.speaker.knows(diagnosis):
                with faults.lookout:
                    repeats.learn(rule, incident, diagnosis)

    def noticed(self, rules: tuple[Rule, ...], incident: Incident, run: Run, faults: FaultHandler) -> None:
        """Says what a watching thread has found. Nothing is raised: training may go on.

        Raises:
            GradGuardWarning: the user's warning filters turn warnings into errors.
        """
        diagnosis = self._diagnosis(rules, incident, faults)
        if diagnosis is None or _suppressed(diagnosis, incident, run):
            return
        action = run.policy.action_for(diagnosis, raised=False)
        if diagnosis.severity == "info" and action == "log" and not run.speaker.knows(diagnosis):
            _LOGGER.warning("%s", one_line(f"{diagnosis.title()}: {diagnosis.headline}"), extra={"diagnosis": diagnosis})
        self._tell(diagnosis, "warn" if action == "raise" else action, incident, run, faults)

    def verified(self, diagnosis: Diagnosis) -> Diagnosis:
        """The diagnosis, about to be raised, with its fixes tried, where the settings ask for it (`gradguard.runtime.trials`)."""
        if not self.settings.verify or _verified_in_the_end:
            return diagnosis
        try:
            from gradguard.runtime.trials.verify import verified_here

            return verified_here(diagnosis, self.settings, [each for each in self._found if each is not diagnosis])
        except internal_error() as fault:
            say("the verification", "fixes are shown as they are, untried", fault)
            return diagnosis

    def verify_said(self, run: Run) -> None:
        """At the end of a run: tries the fixes of what was only warned of, and logs which one repairs the program."""
        if not self.settings.verify or _verified_in_the_end:
            return
        for diagnosis in run.speaker.said():
            verified = self.verified(diagnosis)
            if all(fix.verified.why is None for fix in verified.fixes):
                continue
            self._found = deque((verified if each is diagnosis else each for each in self._found), maxlen=self._found.maxlen)
            try:
                _LOGGER.warning("%s", render_verified(diagnosis, verified, unicode=False))
                if self.report is not None and ranks.rank() is None:
                    self.report.revise(diagnosis, verified, render_for_error(verified))
                if self.page is not None:
                    self.page.revise(diagnosis, verified)
            except internal_error() as fault:
                say("the verification", "what it found is not shown", fault)

    def announce(self) -> None:
        """A diagnosis is about to be raised."""
        if self.settings.traceback == "full":
            take_back_hook()
        elif not self.launched:
            show_if_uncaught(wanted_color(self.settings), self.settings.verbosity)

    def shorten(self, error: BaseException | None, trace: TracebackType | None = None) -> None:
        """Leaves a diagnosed error with the program's frames, unless all of them are wanted (`gradguard.reporting.tracebacks`)."""
        if self.settings.traceback == "user":
            shorten(error, trace)

    def _diagnosis(self, rules: tuple[Rule, ...], incident: Incident, faults: FaultHandler) -> Diagnosis | None:
        """The first diagnosis that a rule can carry. A rule that fails is a fault of gradguard's, not of the training."""
        text = incident.message.lower()
        for rule in rules:
            if rule.messages and incident.error is not None and not any(piece in text for piece in rule.messages):
                continue
            try:
                with this_rank_only():
                    found = rule.recognise(incident)
            except internal_error(OtherRanksNeeded):
                continue
            except internal_error() as fault:
                faults.fault(fault, (rule,))
                continue
            if found is not None:
                updates: dict[str, Any] = {"step": incident.step, "rank": ranks.rank(), "traced": incident.traced}
                if found.culprit is not None and incident.is_ahead(found.culprit.file, found.culprit.line):
                    updates["culprit"] = None  # what is not known is said to be so
                if incident.error is not None and found.torch_message is None:
                    updates["torch_message"] = incident.message
                if self.aside is not None:
                    updates["notes"] = [*found.notes, self.aside]
                try:
                    updates["breadcrumbs"] = found.breadcrumbs or recent_events(incident.journal)
                except internal_error() as fault:
                    say("the list of events before a diagnosis", "it is left out", fault)
                try:
                    updates["fixes"] = completed(found.fixes, rule.docs)
                    updates["alternatives"] = [
                        each.model_copy(update={"fixes": completed(each.fixes, rule.docs)}) for each in found.alternatives
                    ]
                except internal_error() as fault:
                    say("the patches of a diagnosis", "the report does not say which files they are for", fault)
                return found.model_copy(update=updates)
        return None

    def record(self, diagnosis: Diagnosis, faults: FaultHandler) -> str:
        """Into the report and the list of diagnoses; gives the text."""
        for witness in witnesses:
            witness(diagnosis)
        try:
            text = render_for_error(diagnosis)
        except internal_error() as fault:
            say("the renderer", "a diagnosis is shown without its code", fault)
            text = f"{diagnosis.title()}: {diagnosis.headline}\n\n{diagnosis.torch_message or ''}".rstrip()
        again = diagnosis.rank is not None and any(each.key == diagnosis.key for each in self._found)  # of a job, each cause once
        self._found.append(diagnosis)
        if self.report is not None and not again and not self._told_elsewhere(diagnosis, faults):
            try:
                self.report.write(diagnosis, text)
            except internal_error() as fault:
                self._report_failed(self.report, fault)
        if self.page is not None and not again:
            try:
                self.page.write(diagnosis)
            except internal_error() as fault:
                self._report_failed(self.page, fault)
        return text

    def _with_evidence(self, diagnosis: Diagnosis, incident: Incident, run: Run) -> Diagnosis:
        """The diagnosis with what its page draws, which can only be seen now; as it is where no page is wanted."""
        if self.page is None:
            return diagnosis
        try:
            from gradguard.runtime.gathering import gathered  # late: few runs write a page

            with this_rank_only():
                return diagnosis.with_evidence(gathered(diagnosis, incident, run))
        except internal_error(OtherRanksNeeded):
            return diagnosis
        except internal_error() as fault:
            say("the HTML report", "a diagnosis stands there without pictures", fault)
            return diagnosis

    def _report_failed(self, report: JsonlReport | HtmlReport, fault: Exception) -> None:
        """Says once that a report is incomplete; what is found is shown all the same."""
        if report not in self._unwritable:
            self._unwritable.append(report)
            _LOGGER.error("gradguard cannot write its report %s; what it finds is shown all the same (%s)", report.path, fault)

    def _told_elsewhere(self, diagnosis: Diagnosis, faults: FaultHandler) -> bool:
        """Whether another rank of a distributed run has said the same."""
        try:
            return ranks.told_elsewhere(diagnosis, None if self.report is None else self.report.path)
        except internal_error() as fault:
            faults.fault(fault, lasting=False)
            return False

    def _tell(self, diagnosis: Diagnosis, action: str, incident: Incident, run: Run, faults: FaultHandler) -> None:
        speaker = run.speaker
        if action == "off":
            return
        if speaker.knows(diagnosis):
            speaker.count(diagnosis)
            return
        diagnosis = self._with_evidence(diagnosis, incident, run)
        text = self.record(diagnosis, faults)
        with aloud():
            if self._told_elsewhere(diagnosis, faults):
                speaker.remember(diagnosis)
            elif action == "warn":
                speaker.emit_warning(diagnosis, text, incident.site)
            else:
                speaker.emit_log(diagnosis, incident.site)


def _suppressed(diagnosis: Diagnosis, incident: Incident, run: Run) -> bool:
    place = incident.place
    return run.suppressions.is_suppressed(diagnosis, None if place is None else place.span()) is not None
