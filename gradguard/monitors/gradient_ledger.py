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
from gradguard.core.foreign_exceptions import internal_error
from gradguard.instrumentation.event_buffer import Coast
from gradguard.instrumentation.facts import BackwardFact
from gradguard.instrumentation.fault_barrier import mute
from gradguard.instrumentation.journal import current_journal
from gradguard.monitors import idle_ledger, ledger_verdicts, lightning_fits, moving_frozen
from gradguard.monitors.accumulation import accumulated, scale_facts
from gradguard.monitors.cross_network import Crossing
from gradguard.monitors.cut_paths import Severed
from gradguard.monitors.findings import Finding
from gradguard.monitors.grad_scaler import Scaling, touched
from gradguard.monitors.learning_rates import Schedules, rate_of
from gradguard.monitors.optimizer_books import Book, Part, unchanged
from gradguard.monitors.own_state import OwnStates
from gradguard.monitors.retained_graphs import Retained, tag_due
from gradguard.monitors.summary_records import Recorder
from gradguard.monitors.surveys import SURVEYS, Survey
from gradguard.monitors.train_modes import Modes
from gradguard.monitors.undifferentiated import Undifferentiated
from gradguard.probes import replicas
from gradguard.torch_compat.private_api import quiet

# Gradients are followed in the first steps, after an optimizer is made or something looks odd, and in one window of steps out
# of 32 from then on, later out of 64: a loop that is wrong is wrong in each of its rounds.
_AWAKE_FIRST = 64
_AWAKE = 8
_ASLEEP, _LONG, _LONG_ASLEEP = 248, 1_000, 504


class Ledger:
    """See the module's docstring. One a run of a guard; every method is called by the session of the thread.

    Args:
        options: a rule's thresholds and windows (its `Options`), by its code.
    """

    PART = "ledger of the step protocol"

    def __init__(self, options: Callable[[str], Any]) -> None:
        self.failed = False
        self.options = options  # a rule's thresholds and windows, by its code
        self.books: dict[int, Book] = {}
        self.journal = current_journal()
        self._began = self.journal.step
        self.began_at = self.journal.tick()  # what the thread did before is another training's
        self.backwards = 0
        self.steps = 0
        self.stepping: list[int] = []  # optimizers inside whose step() we are
        self.last_zero: tuple[CallSite | None, int, int] | None = None  # site, backwards, steps
        self.zeroed_by: weakref.ref[Any] | None = None  # whose zero_grad() that was
        self.found: list[Finding] = []
        self.ended: list[Book] = []  # optimizers that died since we looked last
        self.fits = False  # whether any optimizer belongs to a fit of Lightning's that optimizes by hand
        self.asleep = False  # between two windows in which gradients are followed (`gradguard.monitors.idle_ledger`)
        self.coast: Coast | None = None  # under way, with steps that are yet to be counted
        self.turn_at = _AWAKE_FIRST  # steps at which it falls asleep, or wakes up
        self.opened_at = 0  # steps when the guard was entered
        self.opened_backwards = 0
        self.wastes: dict[tuple[CallSite | None, CallSite | None], list[int]] = {}
        self.clips: dict[CallSite | None, int] = {}
        self.assignments: list[tuple[weakref.ref[Any], CallSite | None, int]] = []
        self.loaded: list[weakref.ref[Any]] = []
        self.called: dict[int, tuple[weakref.ref[Any], CallSite | None, bool]] = {}  # modules seen running, in a census
        self.counted: dict[int, Counter[CallSite | None]] = {}  # and how often, by the calling line
        self.census_until = 0  # steps
        self.casts: list[tuple[weakref.ref[Any], CallSite | None]] = []
        self.recorder: Recorder | None = None  # where a closing summary was asked for
        self.survey = Survey(self)
        self.severed = Severed(self.journal)
        self.crossing = Crossing()
        self.modes = Modes(self)
        self.retained = Retained()
        self.schedules = Schedules(self)
        self.scaling = Scaling()
        self.own_states = OwnStates()
        self.derivatives = Undifferentiated(self.journal)

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

    def book_of(self, optimizer: Any) -> Book:
        """The book of an optimizer, opened if need be."""
        book = self.books.get(id(optimizer))
        if book is None or book.ref() is not optimizer:
            book = self.books[id(optimizer)] = Book(optimizer, self._died)
            book.made_at = self.steps
            self.survey.stale_ids = True
            if len(self.books) > 64:
                self._drop_dead()
        return book

    def _died(self, book: Book) -> None:
        """An optimizer is being destroyed: the last moment at which its parameters can be looked at."""
        try:
            if self.coast is not None:
                idle_ledger.gone(book, self.coast.rates_of(book.key))
                self.coast.stop()
            if book.steps or book.filled or book.fit is not None:
                with quiet():  # it may die anywhere, such as under a mode of the user's
                    for prepared in book.prepared:
                        verdict = prepared.holds()
                        prepared.holds = (lambda: True) if verdict else (lambda: False)
                    book.gathered["unchanged"] = unchanged(book)
                    book.gathered["idle fit"] = book.fit is not None and book.fit.idle(self)
                self.ended.append(book)
            if self.books.get(book.key) is book:
                del self.books[book.key]
        except internal_error():  # inside a weak reference's callback nothing may be raised
            pass

    def made(self, optimizer: Any, site: CallSite | None) -> None:
        """An optimizer was constructed."""
        if self.ended:
            self.finish_ended()
        self.wake(_AWAKE_FIRST)
        self.survey.often(self.backwards)
        book = self.book_of(optimizer)
        book.made = site
        book.rates.given = rate_of(optimizer)
        book.fit = lightning_fits.begun(self)
        self.fits = self.fits or book.fit is not None

    def _drop_dead(self) -> None:
        for key in [key for key, book in self.books.items() if book.ref() is None]:
            del self.books[key]

    # -- sleeping and waking ------------------------------------------------------------------------------------------

    def wake(self, steps: int = _AWAKE) -> None:
        """Follows gradients for some steps from here on."""
        if self.asleep:
            self.asleep = False
            for book in self.books.values():
                book.backwards_at_step = self.backwards
                book.filled_since_step = book.same_line = 0
                for slot in book.slots:
                    slot.forget()
        self.turn_at = max(self.turn_at, self.steps + steps)

    def backward_asleep(self) -> bool:
        """Counts a backward call; whether it has to be looked at all the same."""
        now = self.backwards + 1
        if tag_due(now) or now >= self.survey.next_at:
            return True
        self.backwards = now
        return False

    def calls(self) -> list[BackwardFact]:
        """The last backward calls of this run, oldest first."""
        return [call for call in self.journal.backwards if call.clock > self.began_at]

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
        if self.backwards >= self.survey.next_at:
            self.survey.walk(call, roots)
        if tag_due(self.backwards):
            self.retained.tag(self.steps, self.backwards, roots, self.found, self.options("GG608"))
        if self.asleep:
            return
        if self.census_until:
            self.severed.look(call, roots)
        self.scaling.backward(call, roots)
        self.crossing.look(call, roots)
        part: Part | None = None
        for book in self.books.values():
            part = book.fill(part, call, self.journal)
            if part is None or book.last_part is not part:
                continue
            if book.filled_since_step > 1:
                scale_facts(book, part, roots)
            if not book.steps and book.filled in (10, 40, 160):
                self.found.append(ledger_verdicts.NoStepYet(book))

    def zeroed(self, owner: Any, site: CallSite | None) -> None:
        """zero_grad() of an optimizer or a module has returned."""
        book = self.books.get(id(owner))
        books = (book,) if book is not None else self.books.values()
        cleared = False
        for each in books:
            wasted: dict[Part, None] = {}
            cleared = each.clear(wasted) or cleared
            if wasted:
                ledger_verdicts.wasted(self, each, wasted, site, owner)
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
        self.zeroed_by = weakref.ref(owner)

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
        if len(self.books) > 1:
            self.crossing.before_use(self, book)
        written = self.scaling.used and touched(book)
        fresh, same, none, stale = book.use()
        if stale and not book.by_hand:
            book.stale += 1
            if book.stale in (2, 24, 100):
                self.found.append(ledger_verdicts.StaleGradients(book))
            book.look_closely()
        if not fresh:
            ledger_verdicts.nothing_new(self, book, same, none)
        else:
            book.empty = 0
            ledger_verdicts.rounds(self, book)
        book.wasted.clear()
        book.clipped_late = None
        if fresh:
            self.scaling.stepped(self, book, optimizer, written)
        if book.sharing and fresh:
            ledger_verdicts.shared(self, book)
        if book.filled_since_step > 1:
            accumulated(self, book)
        book.same_line = 0
        book.filled_since_step = 0
        book.backwards_at_step = self.backwards
        book.nested = bool(self.stepping)
        if self.recorder is not None:
            self.recorder.after_step(book)
        book.rates.look(self, book, optimizer)
        if book.frozen:
            moving_frozen.look(self, book)
        if book.steps in SURVEYS or self.steps == self.survey.again:
            self.survey.after_step(book)
            if len(self.books) > 1:
                ledger_verdicts.find_sharing(self, book)
        elif book.steps == book.idle_at:
            self.survey.look_for_idle(book)
        if self.modes.watching:
            self.modes.after_step(book)
        if self.found and any(each.book is not None and not each.ROUTINE for each in self.found):
            self.turn_at = max(self.turn_at, self.steps + _AWAKE_FIRST)
        elif self.steps >= self.turn_at and not self.census_until:
            self.asleep = True
            self.turn_at = self.steps + (_ASLEEP if self.steps < _LONG else _LONG_ASLEEP)
        if book.steps == book.close_until or len(optimizer.param_groups) != 1 or book.size != len(optimizer.param_groups[0]["params"]):
            book.follow()

    def loaded_optimizer(self, optimizer: Any, site: CallSite | None) -> None:
        """An optimizer's load_state_dict() has returned: its groups have the saved rates."""
        book = self.book_of(optimizer)
        book.loaded = site
        book.rates.brought = (site, book.steps) if rate_of(optimizer) == 0 else None

    def scheduler_made(self, scheduler: Any, site: CallSite | None) -> None:
        """A learning-rate scheduler was constructed."""
        self.schedules.made(scheduler, site)

    def scheduler_stepped(self, scheduler: Any, site: CallSite | None) -> None:
        """A learning-rate scheduler was stepped."""
        self.schedules.stepped(scheduler, site)

    def switched(self, module: Any, mode: bool, was: bool, site: CallSite | None) -> None:
        """A module was put into train or eval mode."""
        self.modes.switched(module, mode, was, site)

    def forward(self, module: Any, arguments: Any, frame: Any, site: CallSite | None) -> None:
        """A module runs with grad mode off."""
        self.modes.forward_without_grad(module, arguments, frame)

    def loaded_state(self, module: Any, assign: bool, state: Any, site: CallSite | None) -> None:
        """load_state_dict() was called; with assign=True it has replaced the module's parameters."""
        self.loaded = [*self.loaded[-63:], weakref.ref(module)]
        if assign:
            self.assignments = [*self.assignments[-15:], (weakref.ref(module), site, self.steps)]
        else:
            self.own_states.loaded(self, module, state, site)

    def census(self, module: Any, frame: Any) -> None:
        """A module is called, in the steps in which that is looked at: where, and with grad mode on or off."""
        known = self.called.get(id(module))
        grad_on = torch.is_grad_enabled()
        caller = user_frame(frame)
        place = None if caller is None else CallSite(caller.f_code, caller.f_lasti)
        if known is None or known[0]() is not module:
            self.counted[id(module)] = Counter()
        self.counted[id(module)][place] += 1
        if known is None or known[0]() is not module or (grad_on and not known[2]):
            self.called[id(module)] = (weakref.ref(module), place, grad_on)

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
            self.casts = [*self.casts[-15:], (weakref.ref(module), site)]
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
        ledger_verdicts.clipping(self, parameters, limit, site)

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
        ledger_verdicts.closing(self)

    def finish_ended(self) -> None:
        """What is to be said of optimizers that are gone."""
        ended, self.ended = self.ended, []
        for book in ended:
            ledger_verdicts.finish(self, book)
