"""The guarding session of one thread: takes what the probes see, decides which steps are traced, turns failures and findings into
incidents.

One session a thread, kept for the thread's life, so that what a step leaves behind is still known in the next
`with gradguard():`. The guards open in a thread stand on its stack: the outermost one's run decides which steps are traced
and keeps what rules remember, the innermost one speaks.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from gradguard.analysis.graph.walk import nodes_from, root_nodes
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.frames import FrameView, live_frames
from gradguard.analysis.memory.allocations import graphs_now, note_refused
from gradguard.core.callsite import CallSite, site_of, user_frame, user_stack
from gradguard.core.errors import GradGuardError
from gradguard.core.foreign_exceptions import internal_error, is_internal
from gradguard.core.moments import Moment
from gradguard.instrumentation.facts import BackwardFact, CallableRef, Cut, StepFact
from gradguard.instrumentation.fault_barrier import Shield, failed_part, in_thread, mute, say
from gradguard.instrumentation.journal import current_journal
from gradguard.instrumentation.refusals import is_refusal, refused, reserve
from gradguard.instrumentation.tensor_refs import UncountedRef
from gradguard.monitors import checkpoints, idle_ledger
from gradguard.monitors.findings import Finding
from gradguard.monitors.memory_growth import MemoryGrew
from gradguard.probes import warning_attribution
from gradguard.probes.backward_nodes import NodeWatch
from gradguard.probes.call_arguments import any_requires_grad
from gradguard.probes.listeners import local, set_coast, set_listener
from gradguard.probes.operators import OpProbe
from gradguard.probes.saved_tensor_hooks import SavedTensors
from gradguard.probes.step_protocol import forget_blocks, watch_forwards
from gradguard.rules.base import Rule, SkipStep
from gradguard.runtime import fast_path
from gradguard.runtime.backward_calls import backward_fact, inputs_of, is_same_call, roots_of
from gradguard.runtime.diagnoser import Diagnoser
from gradguard.runtime.module_hooks import ModuleHooks
from gradguard.runtime.op_tracing import OpTracing
from gradguard.runtime.run import Run
from gradguard.runtime.step_skipping import Withheld, give_back_gradients, withhold_gradients
from gradguard.torch_compat.private_api import can_trace_ops, compiles_backward, held_here, in_backward, quiet, sequence_number
from gradguard.torch_compat.saved_tensors import SHOWN

if TYPE_CHECKING:
    from gradguard.config.settings import Settings
    from gradguard.instrumentation.event_buffer import Coast
    from gradguard.runtime.metric_writing import MetricWriting

_BACKWARDS_PER_STEP = 64
_HANDED_ON = OpProbe.__torch_function__.__code__


class OpenGuard(Protocol):
    """What the session asks of the guards that are open in its thread; `gradguard.runtime.guard.Guard` is one.

    Attributes:
        settings: its own.
        diagnoser: what has its rules asked.
        models: what it was told of.
        run: what it remembers in this thread.
    """

    settings: Settings
    diagnoser: Diagnoser

    @property
    def models(self) -> Any: ...

    @property
    def run(self) -> Run: ...


class Session:
    """See the module's docstring. Implements `gradguard.probes.listeners.Listener`.

    Attributes:
        guards: those open in this thread, the outermost first.
        step: how many steps have begun.
        depth: how many backward calls are under way, one within another.
        ended: whether the loop is over: the step that began behind the last optimizer's step is none.
        faulty: whether anything of gradguard's own has failed in this thread.
        shield: around what keeps account of something.
        lookout: around what is only asked, and kept by nothing.
    """

    def __init__(self) -> None:
        self.journal = current_journal()
        self.guards: list[OpenGuard] = []
        self._runs: dict[tuple[CallSite | None, int], Run] = {}
        self.step = 0
        self.depth = 0
        self.ended = False
        self.faulty = False
        ref = in_thread.session = weakref.ref(self)
        self.shield = Shield(ref)
        self.lookout = Shield(ref, lasting=False)
        # the probe is kept by the thread's function-mode stack: it must not keep the session in a cycle

        def failed(error: BaseException, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            session = ref()
            if session is not None:
                with session.lookout:
                    session.op_failed(error, func, args, kwargs)

        def fault(error: BaseException) -> None:
            session = ref()
            if session is not None:
                session.fault(error)

        self.ops = OpTracing(self.journal, self.shield, failed, fault)
        self.run_engine = self.ops.run_engine
        self.run_python = self.ops.run_python
        self.unwatched = self.ops.unwatched
        self.hooks = ModuleHooks(self.shield)
        self.saving = SavedTensors(self.journal, fault)
        self._memory_steps = 0  # how many more steps are accounted for, though no setting asks for it
        self._under_way: BackwardFact | None = None  # the newest backward call that was not made by another
        self._backwards = 0  # since the step began
        self._opened: Run | None = None  # the run that was under way last
        self._traces = False  # whether the current step is a traced one
        self._calm = False  # whether nothing but the loss has to be looked at in the current step
        self._coast: Coast | None = None  # a stretch of such steps, of which is yet to be told
        self._entered_run: Run | None = None
        self._withheld: Withheld = []  # gradients that the step under way must not see

    @property
    def tracing(self) -> bool:
        """Whether the current step is traced."""
        return self.ops.on

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
                    self.ops.probe.rebind()
            with self.shield:
                run.ledger.opened()
            with self.shield:
                self.hooks.resume(run.ledger, run.depth)
            with self.shield:
                run.depth.resume()
                self.begin_step(entered=True)
            with self.lookout:
                self._switch_saving()

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
            with self.shield:
                self.run.depth.pause()
            with self.shield:
                self.hooks.pause()
                forget_blocks()
            with self.lookout:
                run = self.run
                # a guard around a single step is left a thousand times, mostly by the same files
                if (run.entries < 8 or not run.entries % 64) and run.settings.actions.unused_ignores != "off":
                    run.note_lines(self.journal)
        if len(self.guards) == 1:
            with self.lookout:
                self.saving.switch(False)
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
            self.ops.abandon()
            self.saving.on = False

    def abandon(self, guard: OpenGuard) -> None:
        """A guard is left, though closing it has failed."""
        self._close_from_afar(guard)
        if not self.guards:
            self._off()
            set_listener(None)

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
        self._memory_steps -= self._memory_steps > 0
        if not self.ops.is_set(on, nested=self.depth > 0):
            self.trace(on)
        if self._switch_saving() or on or run.blind or not run.ledger.asleep:
            return
        try:
            self._calm = run.calm.begins(run.notes)
            if self._calm and not self.depth and not self._withheld and self._coast is None:
                self._coast = fast_path.set_off(self, run)
                set_coast(self._coast)
        except internal_error() as error:
            self.fault(error, part=run.calm)

    def _between_backwards(self) -> None:
        """A backward call has ended before any optimizer has stepped: what follows may be traced, where nothing else ends a step."""
        if not self._traces and self.depth <= 1 and (on := self.run.depth.next_part()) != self.tracing:
            self.trace(on)

    def watch_memory(self, steps: int = 2) -> None:
        """Has what is saved for backward noted from here on and in so many steps more: a monitor has seen memory grow."""
        self.catch_up()
        self._memory_steps = max(self._memory_steps, steps + 1)
        self._switch_saving()

    def _switch_saving(self) -> bool:
        """Puts the saved-tensor probe in place where it is wanted, or takes it away; returns whether it is there."""
        saving = self.saving
        settings = self.run.settings
        trace = settings.trace
        wanted = (
            bool(self._memory_steps or settings.memory)
            or (self.tracing and (trace.saved_tensors or (not SHOWN and trace.mode == "always")))
        ) and not self.run.blind
        if wanted != saving.on:
            saving.switch(wanted and not local.compiled)
        if wanted:
            saving.evaluations = self.run.watch.evaluations if settings.memory else None
            if settings.memory:
                self.run.watch.step_ends(saving, self.journal)
            saving.begin_step()
        return wanted

    def catch_up(self) -> None:
        """What was only written down in calm steps is told."""
        coast, self._coast = self._coast, None
        if coast is not None:
            set_coast(None)
            try:
                self._told(fast_path.tell(coast, self.journal, self.step))
            except internal_error() as error:
                mute(coast.run.calm)
                self.fault(error, part=coast.run.ledger)

    def _told(self, stretch: fast_path.Told) -> None:
        self.step, self._backwards = stretch.step, stretch.backwards + (0 if stretch.stepped else self._backwards)
        if stretch.inside:
            self.depth = 1

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
                    self._tell("closing", frame)
                finally:
                    self.ended = False

    def trace(self, on: bool) -> None:
        """Switches the op probe of this thread."""
        if on and self._coast is not None:
            self.catch_up()
        on = on and can_trace_ops() and bool(self.guards) and not self.run.blind
        self.ops.switch(on, self.run.settings.trace if on else None, nested=self.depth > 0)

    def compiled_begins(self) -> None:
        """A function compiled by Dynamo is called: no mode of ours, and no hook on modules, may be in its sight."""
        with self.lookout:
            self.ops.compiled_begins(nested=self.depth > 0)
            self.saving.pause()
            self.hooks.pause()
            if self.guards:
                self.run.ledger.runs_compiled()

    def compiled_ends(self) -> None:
        """It has returned, or calls something that is not to be compiled."""
        with self.lookout:
            if self.guards:
                self.ops.compiled_ends(nested=self.depth > 0)
                self.saving.resume()
                self.hooks.resume(self.run.ledger, self.run.depth)
                watch_forwards()

    def _off(self) -> None:
        """`trace(False)`, whatever happens."""
        with self.lookout:
            self.trace(False)
            return
        self.ops.off()

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
            self.ops.on = False

    # -- incidents ----------------------------------------------------------------------------------------------------

    def op_failed(self, error: BaseException, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A torch call of the user's raised."""
        if is_refusal(error):  # told where it leaves the guard: programs try again with a smaller batch
            with reserve.given_up(error):
                note_refused(self.run.notes, error, refused(func, args, kwargs, graphs_now(self.journal)))
            return
        if isinstance(error, GradGuardError) or not isinstance(error, (RuntimeError, TypeError, ValueError, IndexError)):
            return
        self._failed(error, "forward", sys._getframe(2), func=func, args=args, kwargs=kwargs)

    def _failed(self, error: Exception, where: str, frame: FrameType, **facts: Any) -> None:
        __tracebackhide__ = True
        if not self.guards:
            return

        def frames() -> list[FrameView]:
            inner = _inner_frames(error) if where in ("backward", "grad") else []
            return [view for view in inner if view.is_user] + live_frames(frame)  # a custom backward's own frame, a hook's

        self.explain(self.guard, where, frames, error=error, **facts)

    def explain(self, guard: OpenGuard, where: str, frames: Callable[[], list[FrameView]], **facts: Any) -> None:
        """Has an exception diagnosed; a fault on the way leaves the exception as it is.

        Raises:
            GradGuardError: the diagnosis.
        """
        __tracebackhide__ = True
        self.catch_up()
        with self.lookout, quiet(), reserve.given_up(facts["error"]):
            incident = self.incident("error", where, frames, **facts)
            with self._disposing(incident):
                guard.diagnoser.failed(incident, guard.run, self)

    @contextmanager
    def _disposing(self, incident: Incident) -> Iterator[None]:
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
            notes=self.run.notes,
            **facts,
        )

    def moment(self, moment: Moment, where: str, frame: FrameType, **facts: Any) -> None:
        """Lets the rules that look at this moment look."""
        run, traced = self.run, self.tracing
        with quiet():
            asked: list[Rule] = []
            notes = run.notes
            for screen, rules in run.screens(moment, traced):
                try:
                    if screen is None or screen(notes, moment, facts, traced):
                        asked += rules
                except internal_error() as fault:
                    self.fault(fault, rules)
        if asked:
            asked.sort(key=run.silent_rules(moment, traced).index)
            self._check(tuple(asked), moment, where, frame, **facts)

    def judge(self, finding: Finding, frame: FrameType | None) -> None:
        """Asks the one rule that a finding is for."""
        run = self.run
        if not finding.ROUTINE:  # a look that every healthy program gets
            run.depth.incident()  # the next steps are traced
        if isinstance(finding, MemoryGrew):
            self.watch_memory()
        rules = tuple(rule for rule in run.silent_rules("finding", True) if rule.code == finding.code)
        if rules:
            optimizer = None if finding.book is None else finding.book.ref()
            self._check(rules, "finding", "protocol", frame, finding=finding, optimizer=optimizer)

    def _judge_all(self, findings: Iterable[Finding], frame: FrameType | None) -> None:
        for finding in findings:
            with self.lookout:
                self.judge(finding, frame)

    def _check(self, rules: tuple[Rule, ...], moment: Moment, where: str, frame: FrameType | None, **facts: Any) -> None:
        incident = self.incident(moment, where, lambda: live_frames(frame), **facts)
        with self._disposing(incident), quiet():
            guard = self.guard
            guard.diagnoser.check(rules, incident, guard.run, self)

    def _tell(self, happening: str, frame: FrameType | None, *facts: Any) -> None:
        """Tells the ledger what happened (a method's name of `Ledger` and its arguments). The caller holds up the shield.

        Raises:
            GradGuardError, GradGuardWarning: a rule has found something and the policy raises.
        """
        run = self.run
        ledger = run.ledger
        with quiet():  # by a mode, or by a `__torch_function__` of a tensor's class
            getattr(ledger, happening)(*facts)
        self.hooks.follow(ledger, run.depth)
        if ledger.found:
            found, ledger.found = ledger.found, []
            self._judge_all(found, frame)

    # -- backward calls -----------------------------------------------------------------------------------------------

    def run_backward(self, kind: str, original: Callable[..., Any], frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a backward call of the user's, at which the rules look before and after.

        Raises:
            GradGuardError: what it raised, diagnosed.
        """
        __tracebackhide__ = True
        # autograd.grad is a torch function: this is the call that is under way, by way of the op probe
        if frame.f_back is not None and frame.f_back.f_code is _HANDED_ON:
            return original(*args, **kwargs)
        self._calm = False
        depth = self.depth
        call: BackwardFact | None = None
        roots: tuple[Any, ...] = ()
        again = False
        outermost = kind == "backward" and not depth
        with self.shield:
            if not depth and self.ops.was_taken:  # an optimizer's step() raised: its post hook never came
                self.trace(True)
        with self.lookout:
            roots = roots_of(args, kwargs)
            call = backward_fact(self.journal, kind, frame, args, kwargs, roots, self.step, self.tracing, depth > 0)
            again = depth > 0 and is_same_call(call, self._under_way)
            if not again:
                self._begin(call, frame, roots, depth, outermost)
        if again:  # what it raises is told by the call that handed it on
            return original(*args, **kwargs)
        watch: NodeWatch | None = None
        try:
            if call is not None and self.tracing and self.run.settings.trace.node_hooks and not compiles_backward():
                with self.lookout, quiet():
                    watch = NodeWatch(nodes_from(root_nodes(roots)), self.journal, call.index)
            if compiles_backward() and (verdict := self._refused(kind, roots, args, kwargs)) is not None:
                raise RuntimeError(verdict)
            self.depth = depth + 1
            result = original(*args, **kwargs)
        except BaseException as error:
            self.depth = depth
            if watch is not None:
                with self.lookout:
                    watch.remove()
            with self.lookout:
                self._backward_failed(error, kind, frame, args, kwargs, roots, call)
            raise
        self.depth = depth
        if watch is not None:
            with self.lookout:
                watch.remove()
        self._end(call, frame, roots, outermost, result)
        return result

    def _refused(self, kind: str, roots: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """PyTorch's words of a value under gradguard's hooks that was modified since it was saved: a backward pass that is compiled as a
        whole takes the hook for one that hands the tensor on (`unpack_in_graphs`), and looks at no version."""
        with self.lookout, quiet():
            if not inputs_of(kind, args, kwargs):  # else some nodes may not be asked
                held = (packed for node in nodes_from(root_nodes(roots)) for packed in held_here(node))
                return next((verdict for packed in held if (verdict := packed.verdict()) is not None), None)
        return None

    def _begin(self, call: BackwardFact, frame: FrameType, roots: tuple[Any, ...], depth: int, outermost: bool) -> None:
        """A backward call is about to run."""
        if not depth:
            self._under_way = call
        self.journal.backward_count = call.index
        self.journal.later(call)
        if outermost:
            with self.shield:
                ledger = self.run.ledger
                if not ledger.asleep or ledger.ended:
                    self._tell("before_backward", frame)
            if self.saving.on and self.run.settings.memory:
                with self.lookout:
                    self.run.watch.before_backward(self.saving, self.journal, roots, frame, self.guard.models)
        self.moment("before_backward", call.kind, frame, roots=roots, call=call)

    def _end(self, call: BackwardFact | None, frame: FrameType, roots: tuple[Any, ...], outermost: bool, result: Any) -> None:
        """A backward call has returned; `call` is None where what came before it failed."""
        with self.lookout:
            if self.tracing and call is not None:
                if call.kind == "grad" and not call.create_graph:
                    self._gradients(call, result)
                if not call.nested:
                    with quiet():
                        self.run.ledger.differentiated(call, roots, sequence_number())
        if outermost:
            with self.shield:
                ledger = self.run.ledger
                if call is not None and (not ledger.asleep or ledger.backward_asleep()):
                    self._tell("after_backward", frame, call, roots)
                if not ledger.steps:
                    self._between_backwards()
            if self.saving.on:
                with self.lookout:
                    self.saving.backward_ended()
                    self.run.watch.after_backward()
            with self.shield:
                self._backwards += 1
                if self._backwards > _BACKWARDS_PER_STEP:  # a loop without optimizers still has steps
                    self.begin_step()
        with self.lookout:
            kind = "backward" if call is None else call.kind
            self.moment("after_backward", kind, frame, roots=roots, call=call)

    def _gradients(self, call: BackwardFact, result: Any) -> None:
        """Gradients taken without create_graph have no graph of their own: what is made of them remembers that."""
        cut = Cut("detach", self.journal.tick(), call.site, "autograd.grad", call.seq, call.root_seqs)
        for gradient in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(gradient, torch.Tensor) and not gradient.requires_grad:
                self.journal.remember_cut(gradient, cut)

    def _backward_failed(
        self,
        error: BaseException,
        kind: str,
        frame: FrameType,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        roots: tuple[Any, ...],
        call: BackwardFact | None,
    ) -> None:
        __tracebackhide__ = True
        # an exception of the training's: neither a diagnosis nor come from outside
        if isinstance(error, Exception) and is_internal(error) and not is_refusal(error):
            self._failed(error, kind, frame, roots=roots, inputs=inputs_of(kind, args, kwargs), call=call)

    def coasted_failed(self, error: BaseException, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A backward call that was only written down (`gradguard.instrumentation.event_buffer`) has raised."""
        __tracebackhide__ = True
        self.catch_up()
        self.depth = 0
        with self.lookout:
            self._backward_failed(error, "backward", frame, args, kwargs, args[:1], self._outermost())

    def coasted_returned(self, frame: FrameType, args: tuple[Any, ...]) -> None:
        """A backward call in whose course something out of the ordinary came: in a hook, or in a Function's backward."""
        self.depth = 0
        self._backwards += 1
        with self.shield:
            self._tell("after_backward", frame, self._outermost(), args[:1])

    def _outermost(self) -> BackwardFact | None:
        """The newest backward call that was not made by another."""
        return next((fact for fact in reversed(self.journal.backwards) if not fact.nested), None)

    # -- what else the probes report ----------------------------------------------------------------------------------

    def run_function(self, original: Callable[..., Any], cls: Any, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Function.apply makes its node outside any torch call: the op probe does not see it."""
        if cls.__name__ == "CheckpointFunction":
            with self.lookout:
                self._judge_all(checkpoints.reentrant(self.run.notes, args, site_of(frame)), frame)
        before = sequence_number()
        result = original(cls, *args, **kwargs)
        with self.lookout:
            if sequence_number() != before:
                caller = user_frame(frame)
                if caller is not None:
                    function, clock = CallableRef(cls), self.journal.tick()
                    self.journal.ops.append((before, before + 1, caller.f_code, caller.f_lasti, function, clock))
                    direct = (
                        caller in (frame, frame.f_back)
                        and torch.is_grad_enabled()
                        and any_requires_grad(result if isinstance(result, tuple) else (result,))
                    )
                    if direct and not in_backward():  # nor is it checkpointing's second run
                        self.run.ledger.applied(function, before, clock, user_stack(caller))
        return result

    def mapped(self, frame: FrameType, given: Any, result: Any) -> None:
        """`torch.vmap(f)(...)` has returned: within it tensors are others, and what they remember ends with it."""
        with self.lookout:
            self.ops.probe.lost.mapped(frame, given, result)

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self.shield:
            give_back_gradients(self._withheld)  # the step before raised
        with self.shield:
            self.run.ledger.before_step(optimizer)
        if self._calm:
            return
        with self.lookout:
            self.moment("before_step", "optimizer", sys._getframe(2), optimizer=optimizer, args=args, kwargs=kwargs)
            if self.run.notes.pop(SkipStep) is not None:
                withhold_gradients(optimizer, self._withheld)
                self.run.skipped += 1
        with self.shield:
            if not _has_closure(args, kwargs):
                self.ops.step_aside()

    def after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        frame, site = sys._getframe(2), None
        with self.shield:
            give_back_gradients(self._withheld)
        with self.lookout:
            site = site_of(frame)
            journal = self.journal
            fact = StepFact(journal.tick(), sequence_number(), self.step, site, UncountedRef(optimizer), type(optimizer).__name__)
            journal.later(fact)
        with self.shield:
            self._stepped(frame, optimizer, site)
        if self.run.metrics is not None:
            self._write_metrics(self.run.metrics, optimizer)
        with self.shield:
            self.begin_step()

    def _write_metrics(self, metrics: MetricWriting, optimizer: Any) -> None:
        run, norms = self.run, None
        book = run.ledger.books.get(id(optimizer))
        if book is not None and metrics.due(book):
            with self.lookout:
                norms = metrics.norms(book)
            metrics.tell(run, book.steps, norms)  # in the open: it is the program's own

    def _stepped(self, frame: FrameType, optimizer: Any, site: CallSite | None) -> None:
        ledger = self.run.ledger
        if not ledger.asleep:
            self._tell("after_step", frame, optimizer, site)
            return
        with quiet():
            asked = idle_ledger.step(ledger, optimizer, site)
        self.hooks.idle_step()
        if asked:
            self._tell("nothing", frame)

    def run_checkpoint(self, function: Any, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Non-reentrant checkpointing begins: what the function reads beside its arguments must stay as it is."""
        with self.lookout:
            preserve = args[0] if args else kwargs.get("preserve_rng_state")
            found = checkpoints.begins(self.run.notes, self.journal, function, preserve, site_of(frame))
            self._judge_all(found, frame)

    def protocol(self, happening: str, frame: FrameType, *facts: Any) -> None:
        """Something that the ledger of the step protocol keeps account of."""
        with self.shield:
            ledger = self.run.ledger
            if happening == "zeroed" and ledger.asleep and ledger.recorder is None:
                return
            if happening == "made" or (happening == "switched" and facts[1] != facts[2]):
                self.run.depth.changed = True  # a new optimizer; from train to eval or back
            self._tell(happening, frame, *facts, site_of(frame))

    def wants_forwards(self) -> bool:
        """Whether forwards without grad shall be reported."""
        with self.shield:
            return bool(self.run.ledger.modes.wants_forwards(self.run.ledger))
        return False


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # the hook gets step()'s own arguments, `self` first
    candidates = [*list(args[1:]), kwargs.get("closure")]
    return any(callable(candidate) for candidate in candidates)


def _inner_frames(error: BaseException) -> list[FrameView]:
    """The frames of an exception's traceback inside the backward call, innermost first."""
    found = []
    tb = error.__traceback__
    while tb is not None:
        found.append(FrameView(tb.tb_frame, tb.tb_lasti))
        tb = tb.tb_next
    return found[::-1]


class _Local(threading.local):
    session: Session | None = None


_local = _Local()


def current_session() -> Session:
    """This thread's session, made on first use."""
    session = _local.session
    if session is None:
        session = _local.session = Session()
    return session
