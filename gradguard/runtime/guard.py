"""The guard, as users hold it: settings, a diagnoser, and the ways to open and close the session of a thread."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType, TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from gradguard.analysis.live.frames import traceback_frames
from gradguard.config import sources  # noqa: F401 - not later: a time limit could leave PyYAML imported by half, which it never recovers from
from gradguard.config.settings import Settings, settings_for
from gradguard.core import ranks
from gradguard.core.callsite import CallSite, user_frame
from gradguard.core.diagnosis import Diagnosis
from gradguard.core.errors import ConfigError, GradGuardError
from gradguard.core.foreign_exceptions import internal_error, is_internal
from gradguard.core.safe_read import UNKNOWN, in_class
from gradguard.instrumentation import tensor_refs
from gradguard.instrumentation.fault_barrier import say
from gradguard.instrumentation.refusals import reserve
from gradguard.probes import collective_ring, replicas, sampler_epochs, torch_functions
from gradguard.reporting.jsonl import JsonlReport
from gradguard.reporting.tracebacks import take_back_hook
from gradguard.reporting.writers import Writer, as_function
from gradguard.runtime import rank_watch, workers
from gradguard.runtime.decorator import decorated
from gradguard.runtime.diagnoser import Diagnoser
from gradguard.runtime.metric_writing import MetricWriting
from gradguard.runtime.rerun.guarded_step import run_step
from gradguard.runtime.run import Run
from gradguard.runtime.session import Session, current_session
from gradguard.runtime.summary import RunSummary
from gradguard.torch_compat import saved_tensors
from gradguard.torch_compat.private_api import quiet

if TYPE_CHECKING:
    from gradguard.core.memory_report import MemoryReport

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
_LOOP = 10  # steps within one `with`: even a GAN does not step that often in one


class Guard:
    """One guarding session: a context manager, a decorator, reusable and re-entrant.

    Args:
        objects: models and optimizers, in any order; optional, they only make names better.
        level: "off", "watch", "standard", "strict" or "forensic".
        config: a YAML file with settings.
        report: a file that gets one JSON object a diagnosis.
        settings: ready-made `Settings`, in place of everything else.
        writer: gets how often each cause was met, and gradient norms by layer: an object with `add_scalar(tag, value, step)`
            (TensorBoard), `log_metrics(metrics, step=)` (Lightning's loggers, `mlflow`) or `log(metrics, step=)` (Weights & Biases), or a
            function of metrics and step. Steps are those of the optimizer, from 1.
        write_every: optimizer steps between two writings, each of which waits for the device once.
        overrides: further settings by name, such as `trace__every=500`.

    Raises:
        ConfigError: a setting, file or level that does not exist or fit; the message says where and what would be right.
        TypeError: an object that is no model or optimizer, or a writer that takes no numbers.

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
        writer: Writer | None = None,
        write_every: int = 50,
        **overrides: Any,
    ) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.watch(*objects)
        self.settings = settings if settings is not None else settings_for(level, config, report, overrides)
        self._writer, self._write = writer, None if writer is None else as_function(writer)
        if type(write_every) is not int or write_every < 1:
            raise ConfigError(f"write_every={write_every!r}: a number of optimizer steps, 1 or more")
        self._write_every = write_every
        self.diagnoser = Diagnoser(self.settings)
        self.made_at: CallSite | None = None
        try:
            frame = user_frame(sys._getframe(1))
            self.made_at = None if frame is None else CallSite(frame.f_code, frame.f_lasti)
            ranks.report_begins(None if self.diagnoser.report is None else self.diagnoser.report.path)
        except internal_error() as fault:
            say("the guard", "it does not know where it was made", fault)
        self._open: list[tuple[Session, Run]] = []
        self._last: tuple[Session, Run] | None = None  # of the last entering
        self._private: WeakKeyDictionary[Session, Run] = WeakKeyDictionary()  # by thread
        self._entered_at = 0

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

    def run_of(self, session: Session) -> Run:
        """The run of this guard in another thread, whose session this is."""
        return next((opened[1] for opened in reversed(self._open) if opened[0] is session), None) or self._run_in(session)

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
        return self.diagnoser.found

    def summary(self) -> RunSummary:
        """What the run did so far: steps, parameters that never moved, gradient norms by layer, what was found and ignored.

        Norms and parameters' names are recorded where `summary=True` was set when the guard was made.
        """
        current_session().catch_up()
        return self.run.summary()

    def memory(self) -> MemoryReport:
        """What held memory at the fullest moment so far: what was saved for backward by line, module and operation, and what else.

        Steps are accounted for where `memory=True` was set when the guard was made; without, this is of the present moment.
        """
        from gradguard.runtime.memory_watch import present_memory

        session = current_session()
        session.catch_up()
        with quiet():
            return self.run.watch.report() or present_memory(session.journal, sys._getframe(1), self.models)

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
            torch_functions.install(
                workers.install,
                replicas.install,
                collective_ring.install,
                sampler_epochs.install,
                saved_tensors.install,
                tensor_refs.install,
            )
            reserve.fill()
            session = current_session()
            last = self._last
            if last is None or last[0] is not session:
                last = self._last = (session, self._run_in(session))
            run = last[1]
            run.entries += 1
            if self._write is not None and (run.metrics is None or run.metrics.writer is not self._writer):
                run.metrics = MetricWriting(self._writer, self._write, self._write_every, self.models)
            self._open.append(last)
            session.open(self)
            rank_watch.entered(self, session)
            self._entered_at = session.steps_so_far()
        except BaseException as error:  # `__exit__` will not be called
            if len(self._open) > entered:
                self._leave(self._open[-1])
            if not is_internal(error):
                raise
            say("the guard", "what runs in it is not guarded", error)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        opened, leaving = None, error
        try:  # at once: an exception from outside may come anywhere
            opened = self._opened() if self._open else None
            if opened is None:  # `off`; or left in another thread than it was entered in
                return
            session = opened[0]
            if error is None:
                # a guard around a single step is left a thousand times: only one around a loop has seen a run end
                run = opened[1]
                steps = session.steps_so_far() - self._entered_at
                if (steps >= _LOOP or (steps and run.entries == 1) or session.spans_a_loop()) and len(session.guards) == 1:
                    session.closing(sys._getframe(1))
                    run.tell_repeats()
                    run.tell_metrics()
            elif isinstance(error, KeyboardInterrupt) and len(session.guards) == 1:
                session.catch_up()
                rank_watch.interrupted(error)
                opened[1].interrupted()
            elif isinstance(error, GradGuardError):
                self.diagnoser.shorten(error)
            elif isinstance(error, Exception):
                session.explain(self, "escape", lambda: traceback_frames(tb), error=error)
            if error is None:
                take_back_hook()
        except GradGuardError as found:
            leaving = found
            self.diagnoser.shorten(found, tb)
            raise
        except internal_error() as fault:
            current_session().fault(fault, lasting=False)
        finally:
            try:
                if leaving is not None and opened is not None and len(opened[0].guards) == 1:
                    opened[1].tell_metrics()
                    rank_watch.failed(leaving)
                if opened is None:
                    self.leave()
                else:
                    self._leave(opened)
            except BaseException:
                if opened is not None and opened in self._open:  # an exception from outside, at the first instruction
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
            if not session.guards:
                rank_watch.left()

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
            return self.explaining(run_step, self.diagnoser, lambda: function(*args, **kwargs))
        with self:
            return run_step(self.diagnoser, lambda: function(*args, **kwargs))

    def steps(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterates under the guard, one step an item: `for batch in guard.steps(loader): ...`."""
        for item in loader:
            with self:
                yield item

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
        self.diagnoser.verify_said(run)

    def explaining(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls a function; what it raises is diagnosed right here, before the callers' own handlers see it.

        Raises:
            GradGuardError: the diagnosis.
        """
        try:
            return function(*args, **kwargs)
        except GradGuardError as found:
            self.diagnoser.shorten(found)
            raise
        except internal_error() as error:  # the function's: neither a diagnosis nor from outside
            tb = error.__traceback__
            try:
                current_session().explain(self, "escape", lambda: traceback_frames(tb), error=error)
            except GradGuardError as found:
                self.diagnoser.shorten(found, tb)
                raise
            raise

    def report_to(self, path: str | os.PathLike[str]) -> None:
        """Writes diagnoses to this file from now on."""
        self.diagnoser.report = JsonlReport(path)


def _close(run: Run) -> None:
    """The process ends, and no guard of the run was closed."""
    Guard.of_run(run).close()


gradguard = Guard
