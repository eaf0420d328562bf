"""The guard: opens and closes a session's probes, routes incidents through the rules to the policy."""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType, TracebackType
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.frames import traceback_frames
from gradguard.config import sources  # noqa: F401 - not later: a time limit could leave PyYAML imported by half, which it never recovers from
from gradguard.config.settings import Settings, settings_for, wanted_color
from gradguard.core import ranks
from gradguard.core.callsite import CallSite, user_frame
from gradguard.core.diagnosis import Diagnosis
from gradguard.core.errors import GradGuardError, error_type, mark_seen
from gradguard.core.foreign_exceptions import internal_error, is_internal
from gradguard.core.safe_read import UNKNOWN, attributes, in_class
from gradguard.instrumentation import tensor_refs
from gradguard.instrumentation.fault_barrier import say
from gradguard.probes import replicas, torch_functions
from gradguard.reporting.jsonl import JsonlReport
from gradguard.reporting.terminal.render import render_for_error
from gradguard.reporting.tracebacks import shorten, show_if_uncaught, take_back_hook
from gradguard.rules.base import Rule
from gradguard.rules.registry import rules_for
from gradguard.runtime import workers
from gradguard.runtime.decorator import decorated
from gradguard.runtime.rerun.guarded_step import run_step
from gradguard.runtime.rerun.reachable_state import aloud
from gradguard.runtime.run import Run
from gradguard.runtime.session import Session, current_session
from gradguard.runtime.summary import RunSummary
from gradguard.torch_compat import saved_tensors
from gradguard.torch_compat.private_api import OtherRanksNeeded, this_rank_only

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
_LOGGER = logging.getLogger("gradguard")
_LOOP = 10  # steps within one `with`: even a GAN does not step that often in one


class Guard:
    """One guarding session: a context manager, a decorator, reusable and re-entrant.

    Args:
        objects: models and optimizers, in any order; optional, they only make names better.
        level: "off", "watch", "standard", "strict" or "forensic".
        config: a YAML file with settings.
        report: a file that gets one JSON object a diagnosis.
        settings: ready-made `Settings`, in place of everything else.
        overrides: further settings by name, such as `trace__every=500`.

    Raises:
        ConfigError: a setting, file or level that does not exist or fit; the message says where and what would be right.

    Example:
        >>> with gradguard():
        ...     loss = model(x).pow(2).mean()
        ...     loss.backward()
    """

    def __init__(
        self,
        *objects: Any,
        level: str | None = None,
        config: str | os.PathLike[str] | None = None,
        report: str | os.PathLike[str] | None = None,
        settings: Settings | None = None,
        **overrides: Any,
    ) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.watch(*objects)
        self.settings = settings if settings is not None else settings_for(level, config, report, overrides)
        self.report = JsonlReport(self.settings.report) if self.settings.report is not None else None
        self.made_at: CallSite | None = None
        try:
            frame = user_frame(sys._getframe(1))
            self.made_at = None if frame is None else CallSite(frame.f_code, frame.f_lasti)
            ranks.report_begins(None if self.report is None else self.report.path)
        except internal_error() as fault:
            say("the guard", "it does not know where it was made", fault)
        self._open: list[tuple[Session, Run]] = []
        self._last: tuple[Session, Run] | None = None  # of the last entering
        self._private: WeakKeyDictionary[Session, Run] = WeakKeyDictionary()  # by thread
        self._found: deque[Diagnosis] = deque(maxlen=1_000)
        self._entered_at = 0
        self._unwritable: JsonlReport | None = None  # could not be written, which was said
        self.held: list[tuple[Diagnosis, Exception]] | None = (
            None  # of a step that may be run again (`gradguard.runtime.rerun.guarded_step`)
        )
        self.launched = False  # by `gradguard run`, which shows what leaves the program itself
        self.aside: str | None = None  # what is noted of a step that is run again

    @classmethod
    def of_run(cls, run: Run) -> Guard:
        """A guard that goes on with a run of this thread, whoever began it."""
        guard = cls(settings=run.settings)
        guard.made_at = None
        guard._private[current_session()] = run
        return guard

    @property
    def level(self) -> str:
        """The preset in force."""
        return self.settings.level

    @property
    def run(self) -> Run:
        """What this guard remembers in this thread: shared by guards made at the same line, as in a loop."""
        opened = self._opened()
        return opened[1] if opened is not None else self._run_in(current_session())

    def _opened(self) -> tuple[Session, Run] | None:
        """The session and run of the innermost entering of this guard in this thread: threads may share a guard."""
        session = current_session()
        if self._open and (last := self._open[-1])[0] is session:  # asked some twenty times a step
            return last
        return next((opened for opened in reversed(self._open) if opened[0] is session), None)

    def _run_in(self, session: Session) -> Run:
        if self.made_at is not None:
            return session.run_of(self.made_at, self.settings, _close)
        # made by an adapter, not in a line of the user's: nothing to share it by
        run = self._private.get(session)
        if run is None:
            run = self._private[session] = Run(self.settings, _close)
        return run

    @property
    def diagnoses(self) -> list[Diagnosis]:
        """Everything this guard has found so far, oldest first (the last 1,000)."""
        return list(self._found)

    def summary(self) -> RunSummary:
        """What the run did so far: steps, parameters that never moved, gradient norms by layer, what was found and ignored.

        Norms and parameters' names are recorded where `summary=True` was set when the guard was made.
        """
        current_session().catch_up()
        return self.run.summary()

    def watch(self, *objects: Any) -> Guard:
        """Names models and optimizers (schedulers and scalers are welcome too); returns the guard.

        Raises:
            TypeError: an object that is none of these.
        """
        for item in objects:
            if item is None:
                continue
            if isinstance(item, nn.Module):
                self.models.append(item)
            elif isinstance(item, torch.optim.Optimizer):
                self.optimizers.append(item)
            elif isinstance(item, (list, tuple)):
                self.watch(*item)
            elif type(item) in (FunctionType, MethodType) or (issubclass(type(item), type) and in_class(item, "step") is UNKNOWN):
                what = "class" if issubclass(type(item), type) else "function"
                raise TypeError(
                    f"gradguard takes models and optimizers, and `{item.__name__}` is a {what}; to guard a function, write `@gradguard()` "
                    "above it, with brackets, or `gradguard()(function)`"
                )
            elif not any(in_class(type(item), name) is not UNKNOWN for name in ("step", "unscale_", "__getattr__")):
                raise TypeError(f"gradguard() takes models and optimizers, not {type(item).__name__}")
        return self

    # -- entering and leaving -----------------------------------------------------------------------------------------

    def __enter__(self) -> Guard:
        if self.settings.level == "off":
            return self
        entered = len(self._open)
        try:
            torch_functions.install(workers.install, replicas.install, saved_tensors.install, tensor_refs.install)
            session = current_session()
            last = self._last
            if last is None or last[0] is not session:
                last = self._last = (session, self._run_in(session))
            run = last[1]
            run.entries += 1
            self._open.append(last)
            session.open(self)
            self._entered_at = session.steps_so_far()
        except BaseException as error:  # `__exit__` will not be called
            if len(self._open) > entered:
                self._leave(self._open[-1])
            if not is_internal(error):
                raise
            say("the guard", "what runs in it is not guarded", error)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        opened = self._opened() if self._open else None
        if opened is None:  # `off`; or left in another thread than it was entered in
            self.leave()
            return
        session = opened[0]
        try:
            if error is None:
                # a guard around a single step is left a thousand times: only one around a loop has seen a run end
                run = opened[1]
                steps = session.steps_so_far() - self._entered_at
                if (steps >= _LOOP or (steps and run.entries == 1) or session.spans_a_loop()) and len(session.guards) == 1:
                    session.closing(sys._getframe(1))
                    run.tell_repeats()
            elif isinstance(error, KeyboardInterrupt) and len(session.guards) == 1:
                session.catch_up()
                opened[1].interrupted()
            elif isinstance(error, GradGuardError):
                self.shorten(error)
            elif isinstance(error, Exception):
                session.explain(self, "escape", lambda: traceback_frames(tb), error=error)
            if error is None:
                take_back_hook()
        except GradGuardError as found:
            self.shorten(found, tb)
            raise
        except internal_error() as fault:
            session.fault(fault, lasting=False)
        finally:
            try:
                self._leave(opened)
            except BaseException:
                if opened in self._open:  # an exception from outside, at the first instruction
                    self._leave(opened)
                raise

    def leave(self) -> None:
        """Leaves the guard and looks at nothing, for adapters that enter and leave it in different hooks."""
        if self._open:
            self._leave(self._opened() or self._open[-1])

    def _leave(self, opened: tuple[Session, Run]) -> None:
        session, left = opened[0], len(opened[0].guards) - 1
        try:
            session.close(self)
        except internal_error() as fault:
            session.abandon(self)
            session.fault(fault)
        except BaseException:
            if len(session.guards) > left:  # once more: an exception from outside has come in the midst of it
                session.close(self)
            raise
        finally:
            if opened in self._open:
                self._open.remove(opened)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorates a step function: each call runs under the guard; a generator while it runs, a coroutine until it is done."""
        return decorated(function, self)

    def step(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs one training step; one that fails untraced is run again, traced, so that its line is named all the same.

        The second run starts from the same random state, prints nothing, and nothing of it stays: what the step can reach is put
        back (`rerun.reachable_state`). Where it reaches what cannot be put back (an iterator, a file, another library's object),
        it is not run again. The first failure's own diagnosis is raised then, as it is if the second run does not fail, and says so.

        Args:
            function: the step, called with the remaining arguments.

        Returns:
            What the function returns.

        Raises:
            GradGuardError: the diagnosis, from the traced run where there was one.
        """
        if self.settings.level == "off":
            return function(*args, **kwargs)
        opened = self._opened()
        if opened is not None and opened[0].guards[-1] is self:  # an adapter's hook has entered it for the step
            return self.explaining(run_step, self, lambda: function(*args, **kwargs))
        with self:
            return run_step(self, lambda: function(*args, **kwargs))

    def steps(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterates under the guard, one step an item: `for batch in guard.steps(loader): ...`."""
        for item in loader:
            with self:
                yield item

    # -- incidents ----------------------------------------------------------------------------------------------------

    def failed(self, incident: Incident) -> None:
        """Raises the diagnosis of an exception in its place, if a rule understands it and the policy says so.

        Raises:
            GradGuardError: of the original's type too, with the original as its cause.
        """
        __tracebackhide__ = True
        error = incident.error
        if error is None or attributes(error).get("__gradguard_seen__", False):
            return
        run = self.run
        with current_session().shield:
            run.depth.incident()
        rules = tuple(rule for rule in rules_for("error") if run.asks(rule, raised=True))
        diagnosis = self.diagnose(rules, incident)
        if diagnosis is None or self._suppressed(diagnosis, incident):
            return
        action = run.policy.action_for(diagnosis, raised=True)
        if action == "raise":
            if self.held is not None and isinstance(error, Exception):
                self.held.append((diagnosis, error))  # `step` looks closer before anything is said
                return
            text = self.record(diagnosis)
            self.run.raised[diagnosis.title()] += 1
            self.announce()
            raise error_type(type(error))(text, diagnosis) from error
        mark_seen(error)
        self._tell(diagnosis, action, incident)

    def check(self, rules: tuple[Rule, ...], incident: Incident) -> None:
        """Asks rules for silent bugs; says what they find.

        Raises:
            GradGuardError: the policy says so (levels strict and forensic).
            GradGuardWarning: the user's warning filters turn warnings into errors.
        """
        __tracebackhide__ = True
        for rule in rules:
            repeats, known = self.run.repeats, None
            with current_session().lookout:
                known = repeats.again(rule, incident)
            if known is not None:
                self.run.speaker.count(known)
                continue
            diagnosis = self.diagnose((rule,), incident)
            if diagnosis is None or self._suppressed(diagnosis, incident):
                with current_session().lookout:
                    repeats.unlearn(rule, incident)
                continue
            if not incident.traced:
                self.run.depth.incident()
            action = self.run.policy.action_for(diagnosis, raised=False)
            if action == "raise":
                diagnosis = diagnosis.model_copy(update={"severity": "error"})  # it ends the run
                self.run.raised[diagnosis.title()] += 1
                self.announce()
                raise GradGuardError(self.record(diagnosis), diagnosis)
            self._tell(diagnosis, action, incident)
            if self.run.speaker.knows(diagnosis):
                with current_session().lookout:
                    repeats.learn(rule, incident, diagnosis)

    def announce(self) -> None:
        """A diagnosis is about to be raised."""
        if self.settings.traceback == "full":
            take_back_hook()
        elif not self.launched:
            show_if_uncaught(wanted_color(self.settings))

    def shorten(self, error: BaseException | None, trace: TracebackType | None = None) -> None:
        """Leaves a diagnosed error with the program's frames, unless all of them are wanted (`gradguard.reporting.tracebacks`)."""
        if self.settings.traceback == "user":
            shorten(error, trace)

    def diagnose(self, rules: tuple[Rule, ...], incident: Incident) -> Diagnosis | None:
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
                current_session().fault(fault, (rule,))
                continue
            if found is not None:
                updates: dict[str, Any] = {"step": incident.step, "rank": ranks.rank()}
                if incident.error is not None and found.torch_message is None:
                    updates["torch_message"] = incident.message
                if self.aside is not None:
                    updates["notes"] = [*found.notes, self.aside]
                return found.model_copy(update=updates)
        return None

    def _suppressed(self, diagnosis: Diagnosis, incident: Incident) -> bool:
        place = incident.place
        return self.run.suppressions.is_suppressed(diagnosis, None if place is None else place.span()) is not None

    def record(self, diagnosis: Diagnosis) -> str:
        """Into the report and the list of diagnoses; gives the text."""
        try:
            text = render_for_error(diagnosis)
        except internal_error() as fault:
            say("the renderer", "a diagnosis is shown without its code", fault)
            text = f"{diagnosis.title()}: {diagnosis.headline}\n\n{diagnosis.torch_message or ''}".rstrip()
        self._found.append(diagnosis)
        if self.report is not None and not self._told_elsewhere(diagnosis):
            try:
                self.report.write(diagnosis, text)
            except internal_error() as fault:
                self._report_failed(self.report, fault)
        return text

    def _report_failed(self, report: JsonlReport, fault: Exception) -> None:
        """Says once that lines of the report are missing; what is found is shown all the same."""
        if report is not self._unwritable:
            self._unwritable = report
            _LOGGER.error("gradguard cannot write its report %s; what it finds is shown all the same (%s)", report.path, fault)

    def _told_elsewhere(self, diagnosis: Diagnosis) -> bool:
        """Whether another rank of a distributed run has said the same."""
        try:
            return ranks.told_elsewhere(diagnosis, None if self.report is None else self.report.path)
        except internal_error() as fault:
            current_session().fault(fault, lasting=False)
            return False

    def _tell(self, diagnosis: Diagnosis, action: str, incident: Incident) -> None:
        speaker = self.run.speaker
        if action == "off":
            return
        if speaker.knows(diagnosis):
            speaker.count(diagnosis)
            return
        text = self.record(diagnosis)
        with aloud():
            if self._told_elsewhere(diagnosis):
                speaker.remember(diagnosis)
            elif action == "warn":
                speaker.emit_warning(diagnosis, text, incident.site)
            else:
                speaker.emit_log(diagnosis, incident.site)

    def close(self) -> None:
        """The run is over: says what only a whole run shows, repeats of known causes, ignore comments that silence nothing.

        Happens by itself when a guard around a loop is left, and at the end of the process for one that is entered anew
        in each step.

        Raises:
            GradGuardError: a bug was found, and the policy says to raise it (levels strict and forensic).
        """
        if self.settings.level == "off":
            return
        run = self.run
        session = current_session()
        session.guards.append(self)
        session.forget_run()
        self._open.append((session, run))
        run.ledger.opened_at = run.ledger.opened_backwards = 0  # a guard entered anew in each step has seen a whole run nevertheless
        try:
            session.closing(sys._getframe(1))
        finally:
            self._open.pop()
            session.guards.pop()
            session.forget_run()
            run.finish()

    def explaining(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls a function; what it raises is diagnosed right here, before the callers' own handlers see it.

        Raises:
            GradGuardError: the diagnosis.
        """
        try:
            return function(*args, **kwargs)
        except GradGuardError as found:
            self.shorten(found)
            raise
        except internal_error() as error:  # the function's: neither a diagnosis nor from outside
            tb = error.__traceback__
            try:
                current_session().explain(self, "escape", lambda: traceback_frames(tb), error=error)
            except GradGuardError as found:
                self.shorten(found, tb)
                raise
            raise

    def report_to(self, path: str | os.PathLike[str]) -> None:
        """Writes diagnoses to this file from now on."""
        self.report = JsonlReport(path)


def _close(run: Run) -> None:
    """The process ends, and no guard of the run was closed."""
    Guard.of_run(run).close()


gradguard = Guard
