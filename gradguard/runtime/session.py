"""The guarding session of one thread: takes what the probes see, decides which steps are traced, turns failures into
incidents.

One session a thread, kept for the thread's life, so that what a step leaves behind is still known in the next
`with gradguard():`. The guards open in a thread stand on its stack: the outermost one's run decides which steps are traced
and keeps what rules remember, the innermost one speaks.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any

from gradguard.core.callsite import CallSite, user_frame
from gradguard.core.foreign_exceptions import internal_error
from gradguard.instrumentation.facts import CallableRef, StepFact
from gradguard.instrumentation.fault_barrier import Shield, failed_part, in_thread, mute, say
from gradguard.instrumentation.journal import current_journal
from gradguard.monitors import checkpoints
from gradguard.probes import warning_attribution
from gradguard.probes.compilers import unseen
from gradguard.probes.finite_results import note_nonfinite
from gradguard.probes.listeners import local, set_coast, set_listener
from gradguard.probes.operators import OpProbe
from gradguard.probes.step_protocol import forget_forwards
from gradguard.rules.base import SKIP, Rule
from gradguard.runtime import fast_path, step_events
from gradguard.runtime.backward_calls import coasted_failed, coasted_returned, run_backward
from gradguard.runtime.incident_routing import Incidents
from gradguard.runtime.run import Run
from gradguard.runtime.step_skipping import Withheld, give_back_gradients, withhold_gradients
from gradguard.torch_compat.private_api import (
    call_alone,
    can_trace_ops,
    insert_mode,
    mode_is_active,
    remove_mode,
    sequence_number,
    stands_alone,
)

if TYPE_CHECKING:
    from gradguard.config.settings import Settings
    from gradguard.instrumentation.event_buffer import Coast
    from gradguard.runtime.open_guard import OpenGuard


class Session(Incidents):
    """See the module's docstring. Implements `gradguard.probes.listeners.Listener`."""

    def __init__(self) -> None:
        self.journal = current_journal()
        self.guards: list[OpenGuard] = []
        self._runs: dict[tuple[CallSite | None, int], Run] = {}
        self.tracing = False
        self.step = 0
        self.faulty = False  # whether anything of gradguard's own has failed in this thread
        # the probe is kept by the thread's function-mode stack: it must not keep the session in a cycle
        ref = weakref.ref(self)

        def failed(error: BaseException, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            session = ref()
            if session is not None:
                with session.lookout:
                    session.op_failed(error, func, args, kwargs)

        def fault(error: BaseException) -> None:
            session = ref()
            if session is not None:
                session.fault(error)

        self.probe = OpProbe(self.journal, failed, fault)
        in_thread.session = ref
        self.shield = Shield(ref)
        self.lookout = Shield(ref, lasting=False)  # around what is only asked, and kept by nothing
        self.census: Any = None  # the handle of a hook on module calls, while there is one
        self.forwards: Any = None  # that of one on forwards past DistributedDataParallel
        self.registrations: Any = None  # that of one on what modules are given as parameters
        self.depth = 0  # nested backward calls
        self.under_way: Any = None  # the fact of the newest of those that are not
        self._on = False  # whether the op probe stands on the mode stack, as far as this session put it there
        self._backwards = 0  # since the step began
        self._opened: Run | None = None  # the run that was under way last
        self.ended = False  # the loop is over: the step that began behind the last optimizer's step is none
        self._stands = False  # whether the whole step is watched, apart from what an optimizer and torch's own functions do
        self._lifted = False  # whether the op probe was on the stack, or is to be on it, when what is compiled has ended
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
    def guard(self) -> OpenGuard:
        return self.guards[-1]

    def run_of(self, made_at: CallSite | None, settings: Settings, close: Callable[[Run], None]) -> Run:
        """The run of the guards made at one line with the same settings; `close` is for the end of the process."""
        key = (made_at, id(settings))  # the run keeps its settings, and with them their identity
        run = self._runs.get(key)
        if run is None:
            if len(self._runs) >= 64:
                self._runs.pop(next(iter(self._runs)))
            run = self._runs[key] = Run(settings, close)
        return run

    def open(self, guard: OpenGuard) -> None:
        """A guard is entered in this thread: a step boundary."""
        coast = self._coast
        if coast is not None:
            if self.guards and self.run is guard.run:  # an adapter's hook around a step function: no boundary
                self.guards.append(guard)
                return
            if not self.guards and coast.run is guard.run and not coast.open_ended:
                self.guards.append(guard)
                self.run = coast.run
                warning_attribution.keep()
                coast.enter()
                set_listener(self, coast)
                return
            self.catch_up()
        self.guards.append(guard)
        if len(self.guards) == 1:
            set_listener(self)
            run = self.run = guard.run
            if run is not self._opened:
                if self._opened is not None:
                    self._opened.left()
                self._opened = run
            with self.lookout:
                warning_attribution.keep()
            with self.lookout:
                sizes = guard.settings.journal
                if self.journal.resize(sizes.ops, sizes.writes):
                    self.probe.rebind()
            with self.shield:
                run.ledger.opened()
            with self.shield:
                step_events.resume_census(self)
            with self.shield:
                run.depth.resume()
                self.begin_step(entered=True)

    def close(self, guard: OpenGuard) -> None:
        """A guard is left."""
        if guard not in self.guards:
            return
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
            run = self.run
            with self.shield:
                run.depth.pause()
            with self.shield:
                step_events.pause_census(self)
            with self.lookout:
                # a guard around a single step is left a thousand times, mostly by the same files
                if (run.entries < 8 or not run.entries % 64) and run.settings.actions.unused_ignores != "off":
                    run.note_lines(self.journal)
        if self.guards == [guard]:  # before it is taken from the list: an exception from outside may come anywhere, and one closes again
            self._off()
            set_listener(None)
            self.shield.reset()
            self.lookout.reset()
        for i in range(len(self.guards) - 1, -1, -1):  # the same guard may stand there twice
            if self.guards[i] is guard:
                del self.guards[i]
                self.forget_run()
                break

    def _close_from_afar(self, guard: OpenGuard) -> None:
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
        on = self._traces = not run.blind and run.depth.next_step()
        self._calm = False
        if on != self.tracing or (on and not self._on) or (self._stale and not self.depth):
            self.trace(on)
        if on or run.blind or not run.ledger.asleep:
            return
        try:
            self._calm = run.calm.begins(run.memory)
            if self._calm and not self.depth and not self._withheld and self._coast is None:
                self._coast = fast_path.set_off(self)
                set_coast(self._coast)
        except internal_error() as error:
            self.fault(error, part=run.calm)

    def between_backwards(self) -> None:
        """A backward call has ended before any optimizer has stepped: what follows may be traced, where nothing else ends a step."""
        if not self._traces and self.depth <= 1 and (on := self.run.depth.next_part()) != self.tracing:
            self.trace(on)

    def catch_up(self) -> None:
        """What was only written down in calm steps is told."""
        coast, self._coast = self._coast, None
        if coast is not None:
            set_coast(None)
            try:
                fast_path.catch_up(self, coast)
            except internal_error() as error:
                mute(coast.run.calm)
                self.fault(error, part=coast.run.ledger)

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
                    step_events.tell(self, "closing", frame)
                finally:
                    self.ended = False

    def trace(self, on: bool) -> None:
        """Switches the op probe of this thread."""
        if on and self._coast is not None:
            self.catch_up()
        on = on and can_trace_ops() and bool(self.guards) and not self.run.blind
        if on:
            trace = self.run.settings.trace
            self.probe.prints.whose = trace.contents
            self.probe.locate = note_nonfinite if trace.locate_nonfinite else None
        was = self._on
        self._stand(on)
        self._lifted = on
        # a step that ends within a backward (an optimizer in a hook) leaves the probe where torch will put it back afterwards
        self._stale = not on and self.depth > 0
        self.probe.live = on
        self.tracing = self._on = on
        if was and not on:
            self.probe.results.settle(going_on=False)

    def _stand(self, on: bool, lifted: bool = True) -> None:
        """Puts the op probe on this thread's stack, where nothing compiled is under way, or takes it off.

        Args:
            on: whether it is to watch.
            lifted: False where it is torch that will put it back on the stack, once the function has returned that it handles.
        """
        on = on and not local.compiled
        stands = on or (self.depth > 0 and not local.compiled)  # torch may put it back, see `trace`
        if stands != self._stands:
            unseen.keep(self.probe, stands)
            self._stands = stands
        if not on:
            remove_mode(self.probe)
        elif lifted and not mode_is_active(self.probe):
            insert_mode(self.probe)

    def compiled_begins(self) -> None:
        """A function compiled by Dynamo is called: no mode of ours, and no hook on modules, may be in its sight."""
        self._lifted = mode_is_active(self.probe)
        self._stand(False)
        forget_forwards()
        step_events.pause_census(self)

    def compiled_ends(self) -> None:
        """It has returned, or calls something that is not to be compiled."""
        if self._on and self.tracing and self.guards:
            self._stand(True, self._lifted)

    def _off(self) -> None:
        """`trace(False)`, whatever happens."""
        with self.lookout:
            self.trace(False)
            return
        self.tracing = self._on = self.probe.live = False
        remove_mode(self.probe)

    def fault(self, error: BaseException, rules: tuple[Rule, ...] = (), lasting: bool = True, part: Any = None) -> None:
        """gradguard itself failed: says so once, leaves out the part that failed for the rest of the run, lets the training go on.

        Args:
            error: what was raised.
            rules: asked at the time; they are left out.
            lasting: whether, where no single part is to blame, tracing has to stop.
            part: what is to blame, where the traceback does not tell.
        """
        try:
            self.faulty = True
            run = self.run if self.guards else None
            what, consequence = "the guard", "one look at the training is lost"
            if part is None and not rules:
                part = failed_part(error, lasting)
            if rules:
                what = " and ".join(f"rule {rule.code} ({rule.name})" for rule in rules)
                consequence = "it is off for the rest of this run" if len(rules) == 1 else "they are off for the rest of this run"
                if run is not None:
                    run.leave_out(rules)
            elif part is not None and run is not None:
                what, consequence = f"the {part.PART}", "it is off for the rest of this run"
                run.take_out(part)
            elif lasting:
                consequence = "nothing more is traced in this run"
                if run is not None:
                    run.blind = True
            say(what, consequence, error)
            if run is not None and run.blind:
                self.trace(False)
        except internal_error():
            self.tracing = False

    # -- what the probes report ---------------------------------------------------------------------------------------

    run_backward = run_backward
    coasted_failed = coasted_failed
    coasted_returned = coasted_returned

    def run_engine(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op probe is off while torch handles `backward` itself; custom Functions' backwards shall be seen."""
        probe = self.probe
        put = False
        try:
            try:
                with self.shield:
                    if put := not (mode_is_active(probe) or local.compiled):
                        insert_mode(probe)
                return original(*args, **kwargs)
            finally:
                if put:
                    remove_mode(probe)
        except BaseException:
            if put:  # once more: an exception from outside may have come in the midst of it
                remove_mode(probe)
            raise

    def unwatched(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function without the op probe on the stack; modes of the user's stay."""
        taken = False
        with self.shield:
            if taken := mode_is_active(self.probe):
                remove_mode(self.probe)
        try:
            return function(*args, **kwargs)
        finally:
            if taken:
                with self.shield:
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
            with self.lookout:
                step_events.judge_all(self, checkpoints.reentrant(self.run.memory, args, step_events.site_of(frame)), frame)
        before = sequence_number()
        result = original(cls, *args, **kwargs)
        with self.lookout:
            if sequence_number() != before:
                caller = user_frame(frame)
                if caller is not None:
                    self.journal.ops.append((before, before + 1, caller.f_code, caller.f_lasti, CallableRef(cls), self.journal.tick()))
        return result

    def mapped(self, frame: FrameType, given: Any, result: Any) -> None:
        """`torch.vmap(f)(...)` has returned: within it tensors are others, and what they remember ends with it."""
        with self.lookout:
            self.probe.lost.mapped(frame, given, result)

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self.shield:
            give_back_gradients(self._withheld)  # the step before raised
        with self.shield:
            self.run.ledger.before_step(optimizer)
        if self._calm:
            return
        with self.lookout:
            self.moment("before_step", "optimizer", sys._getframe(2), optimizer=optimizer, args=args, kwargs=kwargs)
            if SKIP in self.run.memory:
                del self.run.memory[SKIP]
                withhold_gradients(optimizer, self._withheld)
                self.run.skipped += 1
        with self.shield:
            if self.tracing and not _has_closure(args, kwargs):
                # most torch calls of a small model's step are its optimizer's own (TORCH_FACTS 29), and none of them is a clue
                remove_mode(self.probe)
                self._on = False

    def after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        frame, site = sys._getframe(2), None
        with self.shield:
            give_back_gradients(self._withheld)
        with self.lookout:
            caller = user_frame(frame)
            site = None if caller is None else CallSite(caller.f_code, caller.f_lasti)
            journal = self.journal
            fact = StepFact(journal.tick(), sequence_number(), self.step, site, weakref.ref(optimizer), type(optimizer).__name__)
            journal.later(fact)
        with self.shield:
            step_events.after_step(self, frame, optimizer, site)
        with self.shield:
            self.begin_step()

    def run_checkpoint(self, function: Any, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Non-reentrant checkpointing begins: what the function reads beside its arguments must stay as it is."""
        with self.lookout:
            preserve = args[0] if args else kwargs.get("preserve_rng_state")
            found = checkpoints.begins(self.run.memory, self.journal, function, preserve, step_events.site_of(frame))
            step_events.judge_all(self, found, frame)

    def protocol(self, happening: str, frame: FrameType, *facts: Any) -> None:
        """Something that the ledger of the step protocol keeps account of."""
        with self.shield:
            if happening == "zeroed" and self.run.ledger.asleep:
                return
            if happening == "made" or (happening == "switched" and facts[1] != facts[2]):
                self.run.depth.changed = True  # a new optimizer; from train to eval or back
            step_events.tell(self, happening, frame, *facts, step_events.site_of(frame))

    def wants_forwards(self) -> bool:
        """Whether forwards without grad shall be reported."""
        with self.shield:
            return bool(self.run.ledger.modes.wants_forwards(self.run.ledger))
        return False


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
