"""The guarding session of one thread: takes what the probes see, decides which steps are traced, turns failures into
incidents.

One session a thread, kept for the thread's life, so that what a step leaves behind is still known in the next
`with gradguard():`. The guards open in a thread stand on its stack: the outermost one's run decides which steps are traced
and keeps what rules remember, the innermost one speaks.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any

from gradguard import calm, checkpointing, step_protocol
from gradguard.backward_calls import coasted_failed, coasted_returned, run_backward
from gradguard.callsite import CallSite, user_frame
from gradguard.facts import StepFact
from gradguard.incidents import Incidents
from gradguard.journal import current_journal
from gradguard.probes import attribution
from gradguard.probes.finite import note_nonfinite
from gradguard.probes.hub import local, set_coast, set_listener
from gradguard.probes.ops import OpProbe
from gradguard.rules.base import SKIP
from gradguard.run import Run
from gradguard.shield import Shield
from gradguard.signals import from_handler
from gradguard.skipping import Withheld, give_back_gradients, withhold_gradients
from gradguard.torch_internals import (
    call_alone,
    can_trace_ops,
    insert_mode,
    mode_is_active,
    remove_mode,
    sequence_number,
    stands_alone,
)

if TYPE_CHECKING:
    from gradguard.coasting import Coast
    from gradguard.guard import Guard
    from gradguard.settings import Settings

logger = logging.getLogger("gradguard")
_DEBUG = bool(os.environ.get("GRADGUARD_DEBUG"))


class Session(Incidents):
    """See the module's docstring. Implements `gradguard.probes.hub.Listener`."""

    def __init__(self) -> None:
        self.journal = current_journal()
        self.guards: list[Guard] = []
        self._runs: dict[tuple[CallSite | None, int], Run] = {}
        self.tracing = False
        self.step = 0
        self.faulty = False
        # the probe is kept by the thread's function-mode stack: it must not keep the session in a cycle
        ref = weakref.ref(self)

        def failed(error: BaseException, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            session = ref()
            if session is not None:
                session.op_failed(error, func, args, kwargs)

        def fault(error: BaseException) -> None:
            session = ref()
            if session is not None:
                session.fault(error)

        self.probe = OpProbe(self.journal, failed, fault)
        self.shield = Shield(ref)
        self.census: Any = None  # the handle of a hook on module calls, while there is one
        self.depth = 0  # nested backward calls
        self.under_way: Any = None  # the fact of the newest of those that are not
        self._on = False  # whether the op probe stands on the mode stack, as far as this session put it there
        self._backwards = 0  # since the step began
        self.ended = False  # the loop is over: the step that began behind the last optimizer's step is none
        self._stale = False  # whether the op probe may have been left on the stack
        self._traces = False  # whether the current step is a traced one
        self._calm = False  # whether nothing but the loss has to be looked at in the current step
        self._coast: Coast | None = None  # a stretch of such steps, of which is yet to be told
        self._entered_run: Run | None = None
        self._withheld: Withheld = []  # gradients that the step under way must not see

    # -- opening, closing, tracing ------------------------------------------------------------------------------------

    @cached_property  # asked some twenty times a step
    def run(self) -> Run:
        """The run of the outermost guard, whose settings and memory count for the steps."""
        return self.guards[0].run

    def forget_run(self) -> None:
        """The stack of guards has changed."""
        self.__dict__.pop("run", None)

    @property
    def guard(self) -> Guard:
        return self.guards[-1]

    def run_of(self, made_at: CallSite | None, settings: Settings) -> Run:
        """The run of the guards made at one line with the same settings."""
        key = (made_at, id(settings))  # the run keeps its settings, and with them their identity
        run = self._runs.get(key)
        if run is None:
            if len(self._runs) >= 64:
                self._runs.pop(next(iter(self._runs)))
            run = self._runs[key] = Run(settings)
        return run

    def open(self, guard: Guard) -> None:
        """A guard is entered in this thread: a step boundary."""
        coast = self._coast
        if coast is not None:
            if self.guards and self.run is guard.run:  # an adapter's hook around a step function: no boundary
                self.guards.append(guard)
                return
            if not self.guards and coast.run is guard.run and not coast.open_ended:
                self.guards.append(guard)
                self.run = coast.run
                attribution.keep()
                coast.enter()
                set_listener(self, coast)
                return
            self.catch_up()
        self.guards.append(guard)
        if len(self.guards) == 1:
            set_listener(self)
            with self.shield:
                attribution.keep()
                sizes = guard.settings.journal
                if self.journal.resize(sizes.ops, sizes.writes):
                    self.probe.rebind()
                run = self.run = guard.run
                run.depth.resume()
                run.ledger.opened()
                self.begin_step(entered=True)

    def close(self, guard: Guard) -> None:
        """A guard is left."""
        if local.listener is not self:
            self._close_from_afar(guard)
            return
        coast = self._coast
        if coast is not None:
            if len(self.guards) > 1 and self.guards[-1] is guard and self.guards[-2].run is guard.run:
                self.guards.pop()
                return
            if len(self.guards) == 1 and not coast.inside:
                del self.guards[:]
                self.forget_run()
                coast.leave()
                set_listener(None)
                return
            self.catch_up()
        if len(self.guards) == 1:
            with self.shield:
                run = self.run
                run.depth.pause()
                step_protocol.end_census(self, run.ledger)
                # a guard around a single step is left a thousand times, mostly by the same files
                if (run.entries < 8 or not run.entries % 64) and run.settings.actions.unused_ignores != "off":
                    run.note_lines(self.journal)
        for i in range(len(self.guards) - 1, -1, -1):  # the same guard may stand there twice
            if self.guards[i] is guard:
                del self.guards[i]
                self.forget_run()
                break
        if not self.guards:
            set_listener(None)
            self.trace(False)

    def _close_from_afar(self, guard: Guard) -> None:
        """A guard is left in another thread than it was entered in: that thread's function modes are out of reach."""
        if self._coast is not None:
            self._coast.stop()
        if guard in self.guards:
            self.guards.remove(guard)
        if not self.guards:
            self.tracing = self._on = self.probe.live = False
            self._stale = True

    def begin_step(self, entered: bool = False) -> None:
        """Decides whether the step that begins is traced.

        Args:
            entered: the boundary is a guard being entered. Where nothing was run backward since the last boundary (the
                optimizer's step at the end of the `with` before), it is the same one.
        """
        if entered and self.step and not self._backwards and self._entered_run is self.run:
            self.trace(self._traces)
            return
        self._entered_run = self.run
        self.step += 1
        self.journal.step = self.step
        self._backwards = 0
        run = self.run
        on = self._traces = run.depth.next_step()
        self._calm = not on and run.ledger.asleep and run.calm.begins(run.memory)
        if on != self.tracing or (on and not self._on) or (self._stale and not self.depth):
            self.trace(on)
        if self._calm and not self.depth and not self._withheld and self._coast is None:
            self._coast = calm.set_off(self)
            set_coast(self._coast)

    def catch_up(self) -> None:
        """What was only written down in calm steps is told."""
        coast, self._coast = self._coast, None
        if coast is not None:
            set_coast(None)
            with self.shield:
                calm.catch_up(self, coast)

    def steps_so_far(self) -> int:
        """How many steps have begun, those included that are only written down."""
        return self.step if self._coast is None else self.step + self._coast.stepped

    def spans_a_loop(self) -> bool:
        """Whether many backward calls ran since the outermost guard was entered."""
        return self.run.ledger.spans_a_loop() or (self._coast is not None and self._coast.since_opened >= 10)

    def closing(self, frame: FrameType) -> None:
        """The outermost guard is about to be left in good order."""
        self.catch_up()
        if len(self.guards) == 1:
            with self.shield:
                self.ended = not self._backwards
                try:
                    step_protocol.tell(self, "closing", frame)
                finally:
                    self.ended = False

    def trace(self, on: bool) -> None:
        """Switches the op probe of this thread."""
        if on and self._coast is not None:
            self.catch_up()
        on = on and not self.faulty and can_trace_ops()
        if on and self.guards:
            trace = self.run.settings.trace
            self.probe.prints.whose = trace.contents
            self.probe.locate = note_nonfinite if trace.locate_nonfinite else None
        if on and not mode_is_active(self.probe):
            insert_mode(self.probe)
        elif not on:
            remove_mode(self.probe)
        # a step that ends within a backward (an optimizer in a hook) leaves the probe where torch will put it back afterwards
        self._stale = not on and self.depth > 0
        self.probe.live = on
        self.tracing = self._on = on

    def fault(self, error: BaseException) -> None:
        """gradguard itself failed: say so once, stop tracing, let the training go on."""
        if from_handler(error):
            raise error
        if _DEBUG:
            logger.error("internal fault", exc_info=error)
        if not self.faulty:
            self.faulty = True
            logger.error(
                "gradguard had an internal fault and stops tracing in this thread; training goes on (%s: %s)", type(error).__name__, error
            )
        self.trace(False)

    # -- what the probes report ---------------------------------------------------------------------------------------

    run_backward = run_backward
    coasted_failed = coasted_failed
    coasted_returned = coasted_returned

    def run_engine(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op probe is off while torch handles `backward` itself; custom Functions' backwards shall be seen."""
        if mode_is_active(self.probe):
            return original(*args, **kwargs)
        insert_mode(self.probe)
        try:
            return original(*args, **kwargs)
        finally:
            remove_mode(self.probe)

    def unwatched(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function without the op probe on the stack; modes of the user's stay."""
        if not mode_is_active(self.probe):
            return function(*args, **kwargs)
        remove_mode(self.probe)
        try:
            return function(*args, **kwargs)
        finally:
            insert_mode(self.probe)

    def run_python(
        self, original: Callable[..., Any], function: Callable[..., Any], relevant: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A torch function written in Python, of plain tensors, for the modes on the stack."""
        __tracebackhide__ = True
        probe = self.probe
        return call_alone(probe, function, args, kwargs) if stands_alone(probe) else original(function, relevant, *args, **kwargs)

    def run_function(self, original: Callable[..., Any], cls: Any, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Function.apply makes its node outside any torch call: the op probe does not see it."""
        if cls.__name__ == "CheckpointFunction":
            with self.shield:
                checkpointing.reentrant(self, args, frame)
        before = sequence_number()
        result = original(cls, *args, **kwargs)
        with self.shield:
            if sequence_number() != before:
                caller = user_frame(frame)
                if caller is not None:
                    self.journal.ops.append((before, before + 1, caller.f_code, caller.f_lasti, cls, self.journal.tick()))
        return result

    def mapped(self, frame: FrameType, given: Any, result: Any) -> None:
        """`torch.vmap(f)(...)` has returned: within it tensors are others, and what they remember ends with it."""
        with self.shield:
            self.probe.lost.mapped(frame, given, result)

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self.shield:
            if self._withheld:  # the step before raised
                self._withheld = give_back_gradients(self._withheld)
            self.run.ledger.before_step(optimizer)
            if self._calm:
                return
            self.moment("before_step", "optimizer", sys._getframe(2), optimizer=optimizer, args=args, kwargs=kwargs)
            if SKIP in self.run.memory:
                del self.run.memory[SKIP]
                self._withheld = withhold_gradients(optimizer)
                self.run.skipped += 1
            if self.tracing and not _has_closure(args, kwargs):
                # most torch calls of a small model's step are its optimizer's own (TORCH_FACTS 29), and none of them is a clue
                remove_mode(self.probe)
                self._on = False

    def after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self.shield:
            if self._withheld:
                self._withheld = give_back_gradients(self._withheld)
            frame = sys._getframe(2)
            caller = user_frame(frame)
            site = None if caller is None else CallSite(caller.f_code, caller.f_lasti)
            journal = self.journal
            fact = StepFact(journal.tick(), sequence_number(), self.step, site, weakref.ref(optimizer), type(optimizer).__name__)
            journal.later(fact)
            step_protocol.after_step(self, frame, optimizer, site)
            self.begin_step()

    def run_checkpoint(self, function: Any, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Non-reentrant checkpointing begins: what the function reads beside its arguments must stay as it is."""
        with self.shield:
            checkpointing.begins(self, function, args[0] if args else kwargs.get("preserve_rng_state"), frame)

    def protocol(self, happening: str, frame: FrameType, *facts: Any) -> None:
        """Something that the ledger of the step protocol keeps account of."""
        if happening == "made" or (happening == "switched" and facts[1] != facts[2]):
            self.run.depth.changed = True  # a new optimizer; from train to eval or back
        if happening == "zeroed" and self.run.ledger.asleep:
            return
        with self.shield:
            step_protocol.tell(self, happening, frame, *facts, step_protocol.site_of(frame))

    def wants_forwards(self) -> bool:
        """Whether forwards without grad shall be reported."""
        return self.run.ledger.modes.wants_forwards()


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # the hook gets step()'s own arguments, `self` first
    candidates = [*list(args[1:]), kwargs.get("closure")]
    return any(callable(candidate) for candidate in candidates)


class _Local(threading.local):
    session: Session | None = None


_local = _Local()


def current_session() -> Session:
    """This thread's session, made on first use."""
    session = _local.session
    if session is None:
        session = _local.session = Session()
    return session
