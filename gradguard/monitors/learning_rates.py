"""Learning rates, schedulers, and whether updates move the parameters at all."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradguard.core.callsite import CallSite
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import attributes, elements, item_of, peek
from gradguard.instrumentation.fault_barrier import barred
from gradguard.instrumentation.tensor_refs import TensorRef
from gradguard.monitors.findings import Finding
from gradguard.torch_compat.private_api import own_part

if TYPE_CHECKING:
    from gradguard.monitors.gradient_ledger import Ledger
    from gradguard.monitors.optimizer_books import Book

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_COMPARE_AFTER = 40
_NEARLY, _PER_EPOCH = 0.1, 5  # a scheduler made for as many steps as the optimizer took, and stepped once in five or more of them
_SWINGS = 8  # half periods of a cosine stepped with every optimizer step: there and back four times
_CALLS_WITHOUT_STEP = 3  # of a scheduler whose optimizer has not stepped in between, while another one has
_OUTRUN, _SHORT = 1.5, 8  # calls of a scheduler for each step of its optimizer; steps at zero that tell, at the end
_SAMPLED = 64
_A_LOT = 0.2  # of the rate at the look before
_NOTHING, _CUTS = 1e-7, 4  # of the highest rate: below what float32 can add to a weight; cuts by a lot, at least


class Rates:
    """The learning rate of one optimizer over its steps, and a sample of low-precision parameters' values."""

    __slots__ = (
        "brought", "cuts", "falling", "falls", "given", "highest", "last", "outrun", "said", "said_beside", "sample", "swung", "tiny",
        "zero",
    )  # fmt: skip

    def __init__(self) -> None:
        self.highest = 0.0
        self.zero = 0
        self.tiny = 0
        self.last: float = 0.0  # at the look before
        self.cuts = 0  # looks at which it had fallen a lot
        self.falling = self.falls = 0  # looks in a row at which it had fallen a lot: now, and at most
        self.said = self.said_beside = self.swung = self.outrun = False
        self.given: Any = None  # the rate that the optimizer was made with
        self.brought: tuple[CallSite | None, int] | None = None  # where a state with a rate of zero was loaded, and after how many steps
        self.sample: list[tuple[weakref.ref[Any], list[float], list[float]]] = []

    def look(self, ledger: Ledger, book: Book, optimizer: Any, weight: int = 1, then: Any = None) -> None:
        """After a step, which stands for `weight` of them.

        Args:
            then: the learning rate at that step, where others have been taken since.
        """
        rate = then if then else rate_of(optimizer)  # a zero that was written down is the first group's: others may have a rate
        if type(rate) is float or type(rate) is int:  # a tensor's value would have to be fetched from its device
            if rate > self.highest:
                self.highest = rate
            if rate < _A_LOT * self.last:
                self.cuts += 1
                self.falling += 1
                self.falls = max(self.falls, self.falling)
            else:
                self.falling = 0
            self.last = rate
            if rate == 0:
                before, self.zero = self.zero, self.zero + weight
                if before < ledger.options("GG611").steps <= self.zero and _all_zero(optimizer):
                    beside = _attribute(optimizer)
                    if beside is not None and not self.said_beside:
                        self.said_beside = True
                        ledger.found.append(ZeroRate(book, beside))
                    elif self.ahead(ledger, book):
                        pass
                    elif self.highest > 0:
                        ledger.found.append(ZeroRate(book))
            elif self.zero:
                self.zero = 0
            elif rate <= (options := ledger.options("GG612")).vanished * self.highest:
                self.tiny += weight
                gone = rate <= _NOTHING * self.highest and self.cuts >= _CUTS
                if self.tiny >= options.steps and (gone or 2 * self.tiny >= book.steps) and not self.said:
                    self.said = True
                    schedule = ledger.schedules.of(optimizer)
                    if schedule is not None and schedule.calls >= 0.9 * book.steps:
                        ledger.found.append(RateVanished(book, schedule, rate))
                    elif schedule is None and (gone or self.falls > 1):  # once may be a rate set anew: after a range test, for fine-tuning
                        ledger.found.append(RateByHand(book, rate))
        if book.steps == 1:
            self._take(book)
        elif self.sample and book.steps >= 1 + _COMPARE_AFTER:
            self._compare(ledger, book)

    def passed(self, rate: Any, weight: int) -> None:
        """The rate at a step, which stands for `weight` of them, of an optimizer that is about to be gone: there is nothing to judge."""
        if type(rate) is float or type(rate) is int:
            self.highest = max(self.highest, rate)
            self.zero = 0 if rate else self.zero + weight

    def finish(self, ledger: Ledger, book: Book) -> None:
        """At the end of training."""
        if self.zero >= ledger.options("GG611").steps and self.highest == 0 and not self.said_beside:
            ledger.found.append(ZeroRate(book))
        optimizer = book.ref()
        if optimizer is not None:
            self.swings(ledger, book, optimizer)
        if self.zero >= _SHORT and 2 * self.zero >= book.steps:
            self.ahead(ledger, book)
        schedule = ledger.schedules.of_book(book)
        if schedule is None or book.steps < ledger.options("GG612").steps:
            return
        span = schedule.span
        most = _NEARLY * span if schedule.type_name == "OneCycleLR" else 0  # which counts batches; others may count epochs, and stop early
        if span and abs(span - book.steps) <= most and schedule.calls * _PER_EPOCH <= book.steps:
            ledger.found.append(SteppedPerEpoch(book, schedule, span))
        elif schedule.type_name == "LambdaLR" and schedule.base and abs(self.highest / schedule.base**2 - 1) < 1e-3 and schedule.base < 0.5:
            ledger.found.append(RateForFactor(book, schedule, self.highest))

    def ahead(self, ledger: Ledger, book: Book) -> bool:
        """Whether a scheduler has reached a rate of zero because it is stepped more often than its optimizer; said once."""
        schedule = ledger.schedules.of_book(book)
        if schedule is None or not schedule.began or self.highest == 0 or self.brought is not None:
            return False
        if schedule.calls - schedule.wound < _OUTRUN * (book.steps - schedule.began_at):
            return False
        if not self.outrun:
            self.outrun = True
            ledger.found.append(ScheduleAhead(book, schedule))
        return True

    def swings(self, ledger: Ledger, book: Book, optimizer: Any) -> None:
        """A cosine that was made to fall once, and has risen and fallen again many times (now and then, and at the end)."""
        schedule = ledger.schedules.of(optimizer)
        if schedule is None or self.swung or not schedule.base or schedule.type_name != "CosineAnnealingLR" or not schedule.span:
            return
        if schedule.calls >= _SWINGS * schedule.span and schedule.calls >= 0.9 * book.steps >= ledger.options("GG612").steps:
            self.swung = True
            ledger.found.append(ScheduleSwings(book, schedule))

    def _take(self, book: Book) -> None:
        chosen = [p for p in book.parameters() if p.dtype in _LOW_PRECISION and p.numel() >= 16 and p.grad is not None and p.requires_grad]
        for parameter in chosen[:: max(1, len(chosen) // 8)][:8]:
            self.sample.append((TensorRef(parameter), _values(parameter), _values(parameter.grad)))

    def _compare(self, ledger: Ledger, book: Book) -> None:
        with_gradient = still = 0
        for ref, values, gradient in self.sample:
            parameter = ref()
            if parameter is None or parameter.grad is None:
                continue
            for old, new, first, last in zip(values, _values(parameter), gradient, _values(parameter.grad), strict=False):
                if first and last:
                    with_gradient += 1
                    still += old == new
        self.sample.clear()
        if with_gradient >= 32 and 2 * still >= with_gradient and self.zero == 0 and self.highest > 0:
            ledger.found.append(RoundedAway(book, still, with_gradient))


def rate_of(optimizer: Any) -> Any:
    """The learning rate of an optimizer's first group, None where it has neither; where that is zero, the highest of all groups."""
    groups = optimizer.param_groups
    rate = groups[0].get("lr") if groups else None
    if type(rate) in (int, float) and rate == 0 and len(groups) > 1:
        return max((other for group in groups if type(other := group.get("lr")) in (int, float)), default=rate)
    return rate


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
        self.ref = weakref.ref(scheduler)
        self.type_name = type(scheduler).__name__
        optimizer = None if (held := peek(scheduler, "optimizer", None)) is None else innermost(held)
        self.optimizer = None if optimizer is None else weakref.ref(optimizer)
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


class Schedules:
    """The schedulers of a run, by identity; a scheduler that dies is forgotten when there are many."""

    PART = "watch of learning-rate schedulers"

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = weakref.ref(ledger)
        self._known: dict[int, Schedule] = {}

    def _schedule(self, scheduler: Any) -> Schedule:
        known = self._known.get(id(scheduler))
        if known is None or known.ref() is not scheduler:
            if len(self._known) > 32:
                self._known = {key: each for key, each in self._known.items() if each.ref() is not None}
            known = self._known[id(scheduler)] = Schedule(scheduler)
        return known

    @barred
    def made(self, scheduler: Any, site: CallSite | None) -> None:
        """A scheduler was constructed."""
        schedule = self._schedule(scheduler)
        schedule.made = site
        optimizer = None if schedule.optimizer is None else schedule.optimizer()
        ledger = self._ledger()
        if optimizer is not None and ledger is not None:
            schedule.began = rate_of(optimizer)
            book = ledger.books.get(id(optimizer))
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
    def stepped(self, scheduler: Any, site: CallSite | None) -> None:
        """`scheduler.step()` was called by the user."""
        ledger = self._ledger()
        optimizer = peek(scheduler, "optimizer", None)
        if ledger is None or optimizer is None:
            return
        optimizer = innermost(optimizer)
        schedule = self._schedule(scheduler)
        schedule.site = site
        schedule.calls += 1
        book = ledger.book_of(optimizer)
        if book.steps == schedule.began_at:
            schedule.wound += 1
        others = ledger.steps - book.steps
        if schedule.steps_at_call == book.steps and others > schedule.others_at_call:
            schedule.calls_without_step += 1
            if schedule.calls_without_step == _CALLS_WITHOUT_STEP:
                mine = {id(p) for p in book.parameters()}
                other = next(
                    (b for b in ledger.books.values() if b is not book and b.steps and any(id(p) in mine for p in b.parameters())), None
                )
                if other is not None:
                    ledger.found.append(OtherSchedule(book, schedule, other))
        else:
            schedule.calls_without_step = 0
        schedule.steps_at_call = book.steps
        schedule.others_at_call = others
