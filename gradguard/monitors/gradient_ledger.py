"""The ledger: which backward call filled which gradients, which step used them, what cleared them.

A *part* is one backward call's contribution to one parameter's gradient: used by a step, cleared, or left over. The ledger
follows the parts of a few parameters of every optimizer (all of them in the first steps and while something looks odd) by
identity and version of `.grad`, at the moments where the session looks: around backward, after zeroing, after a step. It
holds no tensor, gradient or module alive; an optimizer that dies takes its book with it.

What it costs: about 0.3 microseconds a followed parameter and moment while awake, about 2 microseconds a step asleep.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch

from gradguard.core.callsite import CallSite, user_frame
from gradguard.core.safe_read import in_class
from gradguard.instrumentation.facts import BackwardFact, CallableRef
from gradguard.instrumentation.fault_barrier import mute
from gradguard.instrumentation.journal import current_journal
from gradguard.instrumentation.tensor_refs import UncountedRef
from gradguard.monitors import lightning_fits
from gradguard.monitors.accumulation import Accumulation
from gradguard.monitors.cross_network import Crossing
from gradguard.monitors.cut_paths import Severed
from gradguard.monitors.grad_scaler import Scaling, touched
from gradguard.monitors.learning_rates import Schedules
from gradguard.monitors.ledger_verdicts import Contributions, Sharing
from gradguard.monitors.memory_growth import Growth
from gradguard.monitors.monitor import Backward, Clipping, Monitor, Step, Zeroing, listeners
from gradguard.monitors.moving_frozen import FrozenMoves
from gradguard.monitors.optimizer_books import Book, Part, rate_of, unchanged
from gradguard.monitors.own_state import OwnStates
from gradguard.monitors.retained_graphs import Retained, tag_due
from gradguard.monitors.summary_records import Recorder, Zeroed
from gradguard.monitors.surveys import SURVEYS, Survey
from gradguard.monitors.train_modes import Modes
from gradguard.monitors.trained_copies import TrainedCopies
from gradguard.monitors.undifferentiated import Made, Undifferentiated
from gradguard.monitors.unused_updates import UnusedUpdates
from gradguard.monitors.view import AWAKE_FIRST, View
from gradguard.probes import replicas

# Gradients are followed in the first steps, after an optimizer is made or something looks odd, and in one window of steps out
# of 32 from then on, later out of 64: a loop that is wrong is wrong in each of its rounds.
_ASLEEP, _LONG, _LONG_ASLEEP = 248, 1_000, 504


class Ledger(View):
    """See the module's docstring. One a run of a guard; every method is called by the session of the thread.

    Args:
        options: a rule's thresholds and windows (its `Options`), by its code.
        recorded: whether a closing summary or an HTML report is asked for.
    """

    PART = "ledger of the step protocol"

    def __init__(self, options: Callable[[str], Any], recorded: bool = False) -> None:
        self._began = current_journal().step
        super().__init__(options)
        self.failed = False
        self.fits = False  # whether any optimizer belongs to a fit of Lightning's that optimizes by hand
        self.opened_at = 0  # steps when the guard was entered
        self.opened_backwards = 0
        self.assignments: list[tuple[weakref.ref[Any], CallSite | None, int]] = []
        self.loaded: list[weakref.ref[Any]] = []
        self.called: dict[int, tuple[weakref.ref[Any], CallSite | None, bool]] = {}  # modules seen running, in a census
        self.counted: dict[int, Counter[CallSite | None]] = {}  # and how often, by the calling line
        self._hidden_calls = False  # whether modules may have run unseen since the census began
        self.casts: list[tuple[weakref.ref[Any], CallSite | None]] = []
        self.survey = Survey()
        self.severed = Severed(self.journal)
        self.modes = Modes()
        self.retained = Retained()
        self.growth = Growth()
        self.schedules = Schedules()
        self.scaling = Scaling()
        self.own_states = OwnStates()
        self.trained_copies = TrainedCopies()
        self.derivatives = Undifferentiated(self.journal)
        self.contributions = Contributions()
        self.frozen_moves = FrozenMoves()
        self.recorder = Recorder() if recorded else None
        monitors: tuple[Monitor, ...] = (
            self.frozen_moves,  # looks at what the survey of the step before has noted
            self.survey, self.retained, self.severed, self.scaling, Crossing(), self.contributions, Sharing(), Accumulation(),
            UnusedUpdates(), self.growth,
            self.trained_copies, *([] if self.recorder is None else [self.recorder]), self.schedules, self.modes,
        )  # fmt: skip
        on_backward = listeners(monitors, "on_backward")
        self._on_backward_first = tuple(each for each in on_backward if each.ASLEEP)
        self._on_backward = tuple(each for each in on_backward if not each.ASLEEP)
        self._on_zero_grad = listeners(monitors, "on_zero_grad")
        self._before_use = listeners(monitors, "before_use")
        self._on_step = listeners(monitors, "on_step")
        self._on_clip = listeners(monitors, "on_clip")
        self._on_close = listeners(monitors, "on_close")

    def unwritten(self) -> Ledger:
        """A ledger in place of this one, which knows nothing and takes note of nothing: it only numbers the steps."""
        other = Ledger(self.options)
        other._began = self._began
        mute(other, but=("turn",))
        other.failed = True
        return other

    # -- optimizers ---------------------------------------------------------------------------------------------------

    def turn(self, step: int, ended: bool) -> int:
        """The number of a step as a reader counts, within this run.

        Where several optimizers step in each turn of a loop, every one of them ends one of the session's steps, and the turn is
        over when none is behind.

        Args:
            step: the session's count, for what comes before any optimizer's step.
            ended: whether the loop is over.
        """
        if not self.steps:
            return max(1, step - self._began)
        if len(self.books) < 2:  # without a look into the journal, which would first be told what it has not been yet
            return self.steps + (not ended)
        recent = {fact.optimizer() for fact in islice(reversed(self.journal.steps), 8)}
        counts = [book.steps for book in self.books.values() if book.ref() in recent or not book.steps]
        if len(counts) < 2:
            return self.steps + (not ended)
        most = max(counts)
        return most if ended or most - 1 in counts else most + 1

    def made(self, optimizer: Any, site: CallSite | None) -> None:
        """An optimizer was constructed."""
        if self.ended:
            self.finish_ended()
        self.wake(AWAKE_FIRST)
        self.survey.often(self)
        book = self.book_of(optimizer)
        book.made = site
        book.rates.given = rate_of(optimizer)
        book.fit = lightning_fits.begun(self)
        self.fits = self.fits or book.fit is not None

    def backward_asleep(self) -> bool:
        """Counts a backward call; whether it has to be looked at all the same."""
        now = self.backwards + 1
        if tag_due(now) or now >= self.next_survey:
            return True
        self.backwards = now
        return False

    def seek_cuts(self, parameters: list[weakref.ref[Any]]) -> None:
        self.census_until = self.steps + 3
        self._hidden_calls = False
        self.severed.arm(parameters)

    # -- moments ------------------------------------------------------------------------------------------------------

    def before_backward(self) -> None:
        """What happened to the gradients since we looked last was no backward of ours and no zero_grad."""
        if self.ended:
            self.finish_ended()
        for book in self.books.values():
            book.notice_hands()

    def after_backward(self, call: BackwardFact, roots: tuple[Any, ...] = ()) -> None:
        """Which followed parameters this backward gave gradient to."""
        self.backwards += 1
        event = Backward(call, roots, [])
        for monitor in self._on_backward_first:
            self.report(monitor.on_backward(event, self))
        if self.asleep:
            return
        part: Part | None = None
        for book in self.books.values():
            part = book.fill(part, call, self.journal)
            if part is not None and book.last_part is part:
                event.filled.append(book)
        for monitor in self._on_backward:
            self.report(monitor.on_backward(event, self))

    def zeroed(self, owner: Any, site: CallSite | None) -> None:
        """zero_grad() of an optimizer or a module has returned."""
        if self.recorder is not None:
            self.recorder.zeroings.append(Zeroed(self.journal.tick(), self.journal.step, site, type(owner).__name__))
        if self.asleep:
            return
        book = self.books.get(id(owner))
        if book is None and issubclass(type(owner), torch.optim.Optimizer) and hasattr(in_class(type(owner), "step"), "hooked"):
            book = self.book_of(owner)  # made before the guard was entered; its steps, if there are any, will be reported
        books = (book,) if book is not None else self.books.values()
        cleared = False
        for each in books:
            wasted: dict[Part, None] = {}
            cleared = each.clear(wasted) or cleared
            if wasted:
                event = Zeroing(each, wasted, site, UncountedRef(owner))
                for monitor in self._on_zero_grad:
                    self.report(monitor.on_zero_grad(event, self))
            each.zero_site = site
            each.zeros += 1
            each.zeroed_at_step = each.steps
        if (
            book is not None
            and not cleared
            and self.last_zero is not None
            and self.last_zero[1:] == (self.backwards, self.steps)
            and book.filled
        ):
            book.idle_zero = site
        self.last_zero = (site, self.backwards, self.steps)
        self.zeroed_by = UncountedRef(owner)

    def nothing(self) -> None:
        """What was found on the way is to be judged."""
        if self.ended:
            self.finish_ended()

    def before_step(self, optimizer: Any) -> None:
        key = id(optimizer)
        if key in self.stepping:  # its last step() raised
            self.stepping.clear()
        self.stepping.append(key)

    def after_step(self, optimizer: Any, site: CallSite | None) -> None:
        """What the step has used: new parts, or parts that a step had used before."""
        key = id(optimizer)
        if key in self.stepping:
            del self.stepping[self.stepping.index(key) :]
        if self.ended:
            self.finish_ended()
        self.steps += 1
        book = self.book_of(optimizer)
        book.steps += 1
        book.step_site = site
        for monitor in self._before_use:
            self.report(monitor.before_use(book, self))
        written = self.scaling.used and touched(book)
        event = Step(book, optimizer, *book.use(), written, self.survey_due(book))
        book.habit.learn()
        for monitor in self._on_step:
            self.report(monitor.on_step(event, self))
        book.same_line = 0
        book.filled_since_step = 0
        book.backwards_at_step = self.backwards
        book.nested = bool(self.stepping)
        if self.found and any(each.book is not None and not each.ROUTINE for each in self.found):
            self.turn_at = max(self.turn_at, self.steps + AWAKE_FIRST)
        elif self.steps >= self.turn_at and not self.census_until:
            self.asleep = True
            self.turn_at = self.steps + (_ASLEEP if self.steps < _LONG else _LONG_ASLEEP)
        if book.steps == book.close_until or len(optimizer.param_groups) != 1 or book.size != len(optimizer.param_groups[0]["params"]):
            book.follow()

    def survey_due(self, book: Book) -> bool:
        """Whether everything of an optimizer is looked at after this step."""
        return book.steps in SURVEYS or self.steps == self.survey_again

    def loaded_optimizer(self, optimizer: Any, site: CallSite | None) -> None:
        """An optimizer's load_state_dict() has returned: its groups have the saved rates."""
        book = self.book_of(optimizer)
        book.loaded = site
        book.rates.brought = (site, book.steps) if rate_of(optimizer) == 0 else None

    def scheduler_made(self, scheduler: Any, site: CallSite | None) -> None:
        """A learning-rate scheduler was constructed."""
        self.schedules.made(scheduler, self, site)

    def scheduler_stepped(self, scheduler: Any, site: CallSite | None) -> None:
        """A learning-rate scheduler was stepped."""
        self.report(self.schedules.stepped(scheduler, self, site))

    def switched(self, module: Any, mode: bool, was: bool, frame: Any, site: CallSite | None) -> None:
        """A module was put into train or eval mode."""
        self.modes.switched(module, mode, was, self, frame, site)

    def forward(self, module: Any, arguments: Any, frame: Any, site: CallSite | None) -> None:
        """A module runs with grad mode off."""
        self.report(self.modes.forward_without_grad(module, arguments, frame, self))

    def took_state(self, module: Any, state: Any, site: CallSite | None) -> None:
        """state_dict() has returned."""
        self.own_states.taken(module, state, self, site)

    def loaded_state(self, module: Any, assign: bool, state: Any, site: CallSite | None) -> None:
        """load_state_dict() was called; with assign=True it has replaced the module's parameters."""
        self.loaded = [*self.loaded[-63:], UncountedRef(module)]
        if assign:
            self.assignments = [*self.assignments[-15:], (UncountedRef(module), site, self.steps)]
        else:
            self.report(self.own_states.loaded(module, state, self, site))
            self.report(self.trained_copies.loaded(module, state, self, site))

    def differentiated(self, call: BackwardFact, roots: tuple[Any, ...], end: int) -> None:
        """A backward call or an autograd.grad of a traced step has returned.

        Args:
            end: the number that the next graph node will have.
        """
        self.derivatives.went_through(call, roots)
        if call.kind == "grad" and call.create_graph:
            self.report(self.derivatives.made(Made(call.seq, end, call.step, call.clock, call.stack)))

    def applied(self, function: CallableRef, seq: int, clock: int, stack: tuple[CallSite, ...]) -> None:
        """A custom Function of the user's was applied in a traced step, and made a node."""
        self.report(self.derivatives.made(Made(seq, seq + 1, self.journal.step, clock, stack, function)))

    def census(self, module: Any, frame: Any) -> None:
        """A module is called, in the steps in which that is looked at: where, and with grad mode on or off."""
        self.report(self.modes.called(module, frame, self))
        if self._hidden_calls:
            return
        known = self.called.get(id(module))
        grad_on = torch.is_grad_enabled()
        caller = user_frame(frame)
        place = None if caller is None else CallSite(caller.f_code, caller.f_lasti)
        if known is None or known[0]() is not module:
            self.counted[id(module)] = Counter()
        self.counted[id(module)][place] += 1
        if known is None or known[0]() is not module or (grad_on and not known[2]):
            self.called[id(module)] = (UncountedRef(module), place, grad_on)

    def runs_compiled(self) -> None:
        """A compiled function is called: if a census is under way, which modules run where is not known any more."""
        if self.census_until and torch.is_grad_enabled():
            self._hidden_calls = True
            self.called.clear()
            self.counted.clear()

    def calls_of(self, module: Any) -> int:
        """How often a module was called while calls were looked at."""
        return sum(self.counted[id(module)].values()) if id(module) in self.called and self.called[id(module)][0]() is module else 0

    def only_site(self, module: Any) -> CallSite | None:
        """The one line that called it then."""
        sites = self.counted.get(id(module), ())
        return next(iter(sites)) if len(sites) == 1 else None

    def cast(self, module: Any, low: bool, site: CallSite | None) -> None:
        """A module was cast or moved.

        Args:
            low: whether its dtype is a low-precision one now.
        """
        if low:
            self.casts = [*self.casts[-15:], (UncountedRef(module), site)]
        replicas.was_cast(site)

    # -- clipping, closing --------------------------------------------------------------------------------------------

    def scaled(self, scaler: Any, site: CallSite | None) -> None:
        """A loss was scaled: until `unscale_`, gradients are too large."""
        self.scaling.scaled(scaler, site)

    def scaler_updated(self, scaler: Any, site: CallSite | None) -> None:
        """The scaler begins anew."""
        self.scaling.updated()

    def clipping(self, parameters: list[Any], limit: float, site: CallSite | None) -> None:
        """Gradients are about to be clipped: what if a step has used them already, or they are still scaled?"""
        event = Clipping(parameters, limit, site)
        for monitor in self._on_clip:
            self.report(monitor.on_clip(event, self))

    def opened(self) -> None:
        """The guard is entered."""
        self.opened_at, self.opened_backwards = self.steps, self.backwards
        self.stepping.clear()

    def spans_a_loop(self) -> bool:
        """Whether many backward calls ran since the guard was entered, be it without any step; or a fit without any."""
        if self.backwards - self.opened_backwards >= 10:
            return True
        return self.fits and any(book.fit is not None for book in (*self.books.values(), *self.ended))

    def closing(self) -> None:
        """The guard is left: what can only be said at the end is said, if this was more than a single step."""
        self.finish_ended()
        books = list(self.books.values())
        for book in books:
            if book.fit is not None and book.fit.idle(self):
                self.found.append(lightning_fits.idle_fit(self, book))
        steps = self.steps - self.opened_at
        if (steps < 10 and self.backwards < 10) or (steps < 10 and self.steps > 10 and self.steps < 300):
            return
        for book in books:
            if book.ref() is not None:
                book.gathered["unchanged"] = unchanged(book)
                self._close(book)

    def finish_ended(self) -> None:
        """What is to be said of optimizers that are gone."""
        ended, self.ended = self.ended, []
        for book in ended:
            self._close(book)

    def _close(self, book: Book) -> None:
        for monitor in self._on_close:
            self.report(monitor.on_close(book, self))
