"""Failures and moments of a session as incidents: what the rules are asked about, and what becomes of their answers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.frames import FrameView, live_frames
from gradguard.core.errors import GradGuardError
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.moments import Moment
from gradguard.instrumentation.facts import BackwardFact
from gradguard.instrumentation.fault_barrier import Shield
from gradguard.instrumentation.journal import Journal
from gradguard.rules.base import Rule
from gradguard.torch_compat.private_api import quiet

if TYPE_CHECKING:
    from gradguard.runtime.open_guard import OpenGuard
    from gradguard.runtime.run import Run


class Incidents:
    """The part of a thread's session that has rules asked; `gradguard.runtime.session.Session` is the whole."""

    journal: Journal
    guards: list[OpenGuard]
    tracing: bool
    step: int
    depth: int  # nested backward calls
    under_way: Any  # the fact of the newest of those that are not
    census: Any
    forwards: Any
    registrations: Any
    _backwards: int
    _calm: bool
    _on: bool
    ended: bool
    shield: Shield
    lookout: Shield

    @cached_property
    def run(self) -> Run:
        """The run whose settings and memory count."""
        raise NotImplementedError

    @property
    def guard(self) -> OpenGuard:
        """The guard that speaks."""
        raise NotImplementedError

    def catch_up(self) -> None:
        """What was only written down is told."""
        raise NotImplementedError

    def trace(self, on: bool) -> None:
        """Switches the op probe of this thread."""
        raise NotImplementedError

    def begin_step(self, entered: bool = False) -> None:
        """Decides whether the step that begins is traced."""
        raise NotImplementedError

    def between_backwards(self) -> None:
        """A backward call has ended before any optimizer has stepped."""
        raise NotImplementedError

    def fault(self, error: BaseException, rules: tuple[Rule, ...] = (), lasting: bool = True) -> None:
        """gradguard itself failed."""
        raise NotImplementedError

    def op_failed(self, error: BaseException, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A torch call of the user's raised."""
        if isinstance(error, GradGuardError) or not isinstance(error, (RuntimeError, TypeError, ValueError, IndexError)):
            return
        if isinstance(error, torch.OutOfMemoryError):
            return
        self._failed(error, "forward", sys._getframe(2), (), (), None, func, args, kwargs)

    def _failed(
        self,
        error: Exception,
        where: str,
        frame: FrameType,
        roots: tuple[Any, ...],
        inputs: tuple[Any, ...],
        call: BackwardFact | None,
        func: Any = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        __tracebackhide__ = True
        if not self.guards:
            return

        def frames() -> list[FrameView]:
            inner = _inner_frames(error) if where in ("backward", "grad") else []
            return [view for view in inner if view.is_user] + live_frames(frame)  # a custom backward's own frame, a hook's

        facts = {"error": error, "roots": roots, "inputs": inputs, "call": call, "func": func, "args": args, "kwargs": kwargs or {}}
        self.explain(self.guard, where, frames, **facts)

    def explain(self, guard: OpenGuard, where: str, frames: Callable[[], list[FrameView]], **facts: Any) -> None:
        """Has an exception diagnosed; a fault on the way leaves the exception as it is.

        Raises:
            GradGuardError: the diagnosis.
        """
        __tracebackhide__ = True
        self.catch_up()
        with self.lookout, quiet():
            incident = self.incident("error", where, frames, **facts)
            with self.disposing(incident):
                guard.failed(incident)

    @contextmanager
    def disposing(self, incident: Incident) -> Iterator[None]:
        """Lets go of an incident in the end."""
        try:
            yield
        finally:
            with self.lookout:
                incident.dispose()

    def incident(self, moment: Moment, where: str, frames: Callable[[], list[FrameView]], **facts: Any) -> Incident:
        """An incident of this session."""
        return Incident(
            moment,
            where,
            self.journal,
            frames,
            traced=self.tracing,
            step=self.run.ledger.turn(self.step - 1 if self.ended and self.step > 1 else self.step, self.ended),
            models=tuple(self.guard.models),
            memory=self.run.memory,
            **facts,
        )

    def moment(self, moment: Moment, where: str, frame: FrameType, **facts: Any) -> None:
        """Lets the rules that look at this moment look."""
        run, traced = self.run, self.tracing
        with quiet():
            asked: list[Rule] = []
            memory = run.memory
            for screen, rules in run.screens(moment, traced):
                try:
                    if screen is None or screen(memory, moment, facts, traced):
                        asked += rules
                except internal_error() as fault:
                    self.fault(fault, rules)
        if asked:
            asked.sort(key=run.silent_rules(moment, traced).index)
            incident = self.incident(moment, where, lambda: live_frames(frame), **facts)
            with self.disposing(incident), quiet():
                self.guard.check(tuple(asked), incident)


def _inner_frames(error: BaseException) -> list[FrameView]:
    """The frames of an exception's traceback inside the backward call, innermost first."""
    found = []
    tb = error.__traceback__
    while tb is not None:
        found.append(FrameView(tb.tb_frame, tb.tb_lasti))
        tb = tb.tb_next
    return found[::-1]
