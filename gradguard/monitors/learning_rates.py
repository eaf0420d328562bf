"""Learning rates, schedulers, and whether updates move the parameters at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradguard.core.callsite import CallSite
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import attributes, elements, item_of, peek
from gradguard.instrumentation.fault_barrier import barred
from gradguard.instrumentation.tensor_refs import TensorRef, UncountedRef
from gradguard.monitors.findings import Finding
from gradguard.monitors.monitor import Monitor, Step
from gradguard.monitors.optimizer_books import Book, rate_of
from gradguard.torch_compat.private_api import own_part

if TYPE_CHECKING:
    from gradguard.monitors.view import View

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_COMPARE_AFTER = 40
_NEARLY, _PER_EPOCH = 0.1, 5  # a scheduler made for as many steps as the optimizer took, and stepped once in five or more of them
_SWINGS = 8  # half periods of a cosine stepped with every optimizer step: there and back four times
_CALLS_WITHOUT_STEP = 3  # of a scheduler whose optimizer has not stepped in between, while another one has
_OUTRUN, _SHORT = 1.5, 8  # calls of a scheduler for each step of its optimizer; steps at zero that tell, at the end
_SAMPLED = 64
_NOTHING, _CUTS = 1e-7, 4  # of the highest rate: below what float32 can add to a weight; cuts by a lot, at least


def _all_zero(optimizer: Any) -> bool:
    return all(type(rate := item_of(group, "lr")) in (int, float) and rate == 0 for group in elements(peek(optimizer, "param_groups")))


def _attribute(optimizer: Any) -> float | None:
    """The attribute `lr` of one of torch's optimizers, which reads `param_groups` only; None where there is none."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return None
    rate = attributes(optimizer).get("lr")
    return float(rate) if type(rate) in (int, float) and rate else None


def _values(tensor: torch.Tensor | None) -> list[float]:
    if tensor is None:
        return []
    try:
        flat = own_part(tensor).detach().reshape(-1)
        return [float(x) for x in flat[:: max(1, flat.numel() // _SAMPLED)][:_SAMPLED].tolist()]
    except internal_error():
        return []


def innermost(optimizer: Any) -> Any:
    """The optimizer that updates, behind those that frameworks wrap around it."""
    for _ in range(4):
        inner = next((value for value in attributes(optimizer).values() if isinstance(value, torch.optim.Optimizer)), None)
        if inner is None or inner is optimizer:
            break
        optimizer = inner
    return optimizer


class Schedule:
    """One learning-rate scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self.ref = UncountedRef(scheduler)
        self.type_name = type(scheduler).__name__
        optimizer = None if (held := peek(scheduler, "optimizer", None)) is None else innermost(held)
        self.optimizer = None if optimizer is None else UncountedRef(optimizer)
        self.key = id(optimizer)  # the ledger's, which outlives it
        rates = peek(scheduler, "base_lrs", None)
        self.base = max((rate for rate in rates if isinstance(rate, float)), default=0.0) if isinstance(rates, list) else 0.0
        spans = (peek(scheduler, name, None) for name in ("total_steps", "T_max", "total_iters"))
        self.span = next((value for value in spans if isinstance(value, int)), 0)  # calls that it was made for
        lowest = peek(scheduler, "eta_min", 0.0)
        self.low = float(lowest) if isinstance(lowest, (int, float)) else 0.0
        self.made: CallSite | None = None
        self.began: Any = None  # the optimizer's rate when the scheduler had been made, and how many steps it had taken
        self.began_at = 0
        self.site: CallSite | None = None
        self.calls = 0
        self.wound = 0  # calls before its optimizer's first step: a schedule that is wound on to where training was left
        self.calls_without_step = 0
        self.steps_at_call = -1
        self.others_at_call = 0


@dataclass(frozen=True, eq=False)
class ZeroRate(Finding):
    """The learning rate has been zero for long; `beside` is an attribute `lr` that no step reads."""

    CODE = "GG611"

    beside: float | None = None


@dataclass(frozen=True, eq=False)
class RoundedAway(Finding):
    """Of sampled weights in low precision with a gradient, so many stay as they are."""

    CODE = "GG611"

    still: int
    of: int


@dataclass(frozen=True, eq=False)
class RateByHand(Finding):
    """The rate has vanished, and no scheduler drives it."""

    CODE = "GG612"

    rate: float


@dataclass(frozen=True, eq=False)
class ScheduleFinding(Finding):
    """A scheduler that does not do what it was made for."""

    CODE = "GG612"

    schedule: Schedule


@dataclass(frozen=True, eq=False)
class RateVanished(ScheduleFinding):
    """A scheduler has driven the rate to next to nothing."""

    rate: float


@dataclass(frozen=True, eq=False)
class SteppedPerEpoch(ScheduleFinding):
    """Made for as many calls as the optimizer has steps, and called far less often."""

    span: int


@dataclass(frozen=True, eq=False)
class RateForFactor(ScheduleFinding):
    """A function that should return a factor returns a rate."""

    rate: float


class ScheduleAhead(ScheduleFinding):
    """A scheduler has reached a rate of zero because it is stepped more often than its optimizer."""


class ScheduleSwings(ScheduleFinding):
    """A cosine that was made to fall once has risen and fallen many times."""


@dataclass(frozen=True, eq=False)
class OtherSchedule(ScheduleFinding):
    """A scheduler is stepped whose optimizer is not, while another over the same parameters is."""

    other: Book


class Schedules(Monitor):
    """The learning rates of a run's optimizers, and their schedulers, by identity; one that dies is forgotten when there are many."""

    PART = "watch of learning rates"

    def __init__(self) -> None:
        self._known: dict[int, Schedule] = {}

    def on_step(self, event: Step, view: View) -> list[Finding]:
        found = list(self._look(event.book, event.optimizer, view, 1, None))
        return [*found, *self._swings(event.book, view)] if event.survey else found

    def on_close(self, book: Book, view: View) -> list[Finding]:
        return list(self._finish(book, view))

    @barred
    def look(self, book: Book, optimizer: Any, view: View, weight: int, then: Any = None) -> list[Finding]:
        """After a step, which stands for `weight` of them.

        Args:
            then: the learning rate at that step, where others have been taken since.
        """
        return list(self._look(book, optimizer, view, weight, then))

    @barred
    def swings(self, book: Book, view: View) -> list[Finding]:
        """Now and then: a cosine that goes up and down."""
        return list(self._swings(book, view))

    def _look(self, book: Book, optimizer: Any, view: View, weight: int, then: Any) -> Iterator[Finding]:
        rates = book.rates
        rate = then if then else rate_of(optimizer)  # a zero that was written down is the first group's: others may have a rate
        if type(rate) is float or type(rate) is int:  # a tensor's value would have to be fetched from its device
            rates.note(rate)
            if rate == 0:
                before, rates.zero = rates.zero, rates.zero + weight
                if before < view.options("GG611").steps <= rates.zero and _all_zero(optimizer):
                    yield from self._at_zero(book, optimizer)
            elif rates.zero:
                rates.zero = 0
            elif rate <= (options := view.options("GG612")).vanished * rates.highest:
                rates.tiny += weight
                gone = rate <= _NOTHING * rates.highest and rates.cuts >= _CUTS
                if rates.tiny >= options.steps and (gone or 2 * rates.tiny >= book.steps) and not rates.said:
                    rates.said = True
                    schedule = self.of(optimizer)
                    if schedule is not None and schedule.calls >= 0.9 * book.steps:
                        yield RateVanished(book, schedule, rate)
                    elif schedule is None and (gone or rates.falls > 1):  # once may be a rate set anew: after a range test, for fine-tuning
                        yield RateByHand(book, rate)
        if book.steps == 1:
            _take(book)
        elif rates.sample and book.steps >= 1 + _COMPARE_AFTER:
            yield from _compare(book)

    def _at_zero(self, book: Book, optimizer: Any) -> Iterator[Finding]:
        """The rate has been zero for long."""
        rates = book.rates
        beside = _attribute(optimizer)
        if beside is not None and not rates.said_beside:
            rates.said_beside = True
            yield ZeroRate(book, beside)
        elif (schedule := self._ahead(book)) is not None:
            yield from _outrun(book, schedule)
        elif rates.highest > 0:
            yield ZeroRate(book)

    def _finish(self, book: Book, view: View) -> Iterator[Finding]:
        """At the end of training."""
        rates = book.rates
        if rates.zero >= view.options("GG611").steps and rates.highest == 0 and not rates.said_beside:
            yield ZeroRate(book)
        if book.ref() is not None:
            yield from self._swings(book, view)
        if rates.zero >= _SHORT and 2 * rates.zero >= book.steps and (ahead := self._ahead(book)) is not None:
            yield from _outrun(book, ahead)
        schedule = self.of_book(book)
        if schedule is None or book.steps < view.options("GG612").steps:
            return
        span = schedule.span
        most = _NEARLY * span if schedule.type_name == "OneCycleLR" else 0  # which counts batches; others may count epochs, and stop early
        if span and abs(span - book.steps) <= most and schedule.calls * _PER_EPOCH <= book.steps:
            yield SteppedPerEpoch(book, schedule, span)
        elif (
            schedule.type_name == "LambdaLR" and schedule.base and abs(rates.highest / schedule.base**2 - 1) < 1e-3 and schedule.base < 0.5
        ):
            yield RateForFactor(book, schedule, rates.highest)

    def _ahead(self, book: Book) -> Schedule | None:
        """The scheduler that has reached a rate of zero because it is stepped more often than its optimizer."""
        schedule = self.of_book(book)
        if schedule is None or not schedule.began or book.rates.highest == 0 or book.rates.brought is not None:
            return None
        return schedule if schedule.calls - schedule.wound >= _OUTRUN * (book.steps - schedule.began_at) else None

    def _swings(self, book: Book, view: View) -> Iterator[Finding]:
        """A cosine that was made to fall once, and has risen and fallen again many times (now and then, and at the end)."""
        schedule = self.of(book.ref())
        if schedule is None or book.rates.swung or not schedule.base or schedule.type_name != "CosineAnnealingLR" or not schedule.span:
            return
        if schedule.calls >= _SWINGS * schedule.span and schedule.calls >= 0.9 * book.steps >= view.options("GG612").steps:
            book.rates.swung = True
            yield ScheduleSwings(book, schedule)

    def _schedule(self, scheduler: Any) -> Schedule:
        known = self._known.get(id(scheduler))
        if known is None or known.ref() is not scheduler:
            if len(self._known) > 32:
                self._known = {key: each for key, each in self._known.items() if each.ref() is not None}
            known = self._known[id(scheduler)] = Schedule(scheduler)
        return known

    @barred
    def made(self, scheduler: Any, view: View, site: CallSite | None) -> None:
        """A scheduler was constructed."""
        schedule = self._schedule(scheduler)
        schedule.made = site
        optimizer = None if schedule.optimizer is None else schedule.optimizer()
        if optimizer is not None:
            schedule.began = rate_of(optimizer)
            book = view.books.get(id(optimizer))
            schedule.began_at = 0 if book is None or book.ref() is not optimizer else book.steps

    def of(self, optimizer: Any) -> Schedule | None:
        """The newest scheduler of an optimizer."""
        found = None
        for each in self._known.values():
            if each.ref() is not None and each.optimizer is not None and each.optimizer() is optimizer:
                found = each
        return found

    def of_book(self, book: Book) -> Schedule | None:
        """The newest scheduler of a book's optimizer, also when both are gone."""
        optimizer = book.ref()
        found = [each for each in self._known.values() if each.key == book.key and each.optimizer is not None]
        return next((each for each in reversed(found) if each.optimizer is not None and each.optimizer() is optimizer), None)

    @barred
    def gone(self, key: int) -> None:
        """A scheduler of which nothing is left but its id had been stepped while it lived."""
        known = self._known.get(key)
        if known is not None and known.ref() is None:
            known.calls += 1

    @barred
    def stepped(self, scheduler: Any, view: View, site: CallSite | None) -> list[Finding]:
        """`scheduler.step()` was called by the user."""
        optimizer = peek(scheduler, "optimizer", None)
        if optimizer is None:
            return []
        optimizer = innermost(optimizer)
        schedule = self._schedule(scheduler)
        schedule.site = site
        schedule.calls += 1
        book = view.book_of(optimizer)
        if book.steps == schedule.began_at:
            schedule.wound += 1
        others, other = view.steps - book.steps, None
        if schedule.steps_at_call == book.steps and others > schedule.others_at_call:
            schedule.calls_without_step += 1
            if schedule.calls_without_step == _CALLS_WITHOUT_STEP:
                mine = {id(p) for p in book.parameters()}
                candidates = (each for each in view.books.values() if each is not book and each.steps)
                other = next((each for each in candidates if any(id(p) in mine for p in each.parameters())), None)
        else:
            schedule.calls_without_step = 0
        schedule.steps_at_call = book.steps
        schedule.others_at_call = others
        return [] if other is None else [OtherSchedule(book, schedule, other)]


def _outrun(book: Book, schedule: Schedule) -> Iterator[Finding]:
    """Said once."""
    if not book.rates.outrun:
        book.rates.outrun = True
        yield ScheduleAhead(book, schedule)


def _take(book: Book) -> None:
    """Samples parameters in low precision, and their gradients."""
    chosen = [p for p in book.parameters() if p.dtype in _LOW_PRECISION and p.numel() >= 16 and p.grad is not None and p.requires_grad]
    for parameter in chosen[:: max(1, len(chosen) // 8)][:8]:
        book.rates.sample.append((TensorRef(parameter), _values(parameter), _values(parameter.grad)))


def _compare(book: Book) -> Iterator[Finding]:
    """Whether most of the sampled weights that have a gradient stay as they were."""
    rates = book.rates
    with_gradient = still = 0
    for ref, values, gradient in rates.sample:
        parameter = ref()
        if parameter is None or parameter.grad is None:
            continue
        for old, new, first, last in zip(values, _values(parameter), gradient, _values(parameter.grad), strict=False):
            if first and last:
                with_gradient += 1
                still += old == new
    rates.sample.clear()
    if with_gradient >= 32 and 2 * still >= with_gradient and rates.zero == 0 and rates.highest > 0:
        yield RoundedAway(book, still, with_gradient)
