"""What the ledger writes into: parts, followed parameters, and one book an optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gradguard.core.callsite import CallSite
from gradguard.core.safe_read import elements, peek
from gradguard.instrumentation.facts import BackwardFact
from gradguard.instrumentation.journal import Journal
from gradguard.instrumentation.tensor_refs import TensorRef, UncountedRef
from gradguard.monitors.gradient_habits import Habit
from gradguard.monitors.tensor_state import few_values, version_of

LOOK_EVERY = 8  # steps between two looks at a learning rate while no gradients are followed
_A_LOT = 0.2  # of the rate at the look before
_CLOSE_STEPS = 5  # of a book, in which every parameter is followed
_FOLLOWED = 3  # parameters of an optimizer followed after that
_MOST_FOLLOWED = 512
_MOST_PARTS = 256  # unused contributions remembered of one parameter


class Part:
    """One backward call, as far as followed parameters got gradient from it."""

    __slots__ = ("call", "cleared", "filled", "reads", "shares", "unknown", "used")

    def __init__(self, call: BackwardFact, reads: int) -> None:
        self.call = call
        self.filled = 0
        self.used = 0
        self.cleared = 0
        self.unknown = 0  # taken away by other means than zero_grad
        self.reads = reads  # how often the user's code had read a `.grad` before, in traced steps
        self.shares: dict[int, Share] = {}  # by the key of the book


class Share:
    """What one optimizer's followed parameters got of a part."""

    __slots__ = ("cleared", "filled", "first", "owner", "unread", "used", "version", "zero")

    def __init__(self, first: weakref.ref[Any], version: int) -> None:
        self.first = first  # one of the parameters, and its version at the call
        self.version = version
        self.filled = 0
        self.used = 0
        self.cleared = 0
        self.unread = False  # nobody looked at a gradient between the call and the clearing, in a traced step
        self.zero: CallSite | None = None  # what has cleared the last of it, and whose zero_grad() that was
        self.owner: weakref.ref[Any] | None = None

    def written(self) -> bool:
        """Whether the parameters were updated since, by whatever means."""
        parameter = self.first()
        return parameter is not None and version_of(parameter) != self.version

    @property
    def wasted(self) -> bool:
        """Whether all of it was cleared unused."""
        return not self.used and self.cleared == self.filled


class Waste:
    """Backward calls of one line whose gradients were cleared unused since an optimizer's last step."""

    __slots__ = ("calls", "owner", "unread", "zero")

    def __init__(self) -> None:
        self.calls = 0
        self.unread = 0  # of these, those between which and the clearing nobody looked at a gradient
        self.zero: CallSite | None = None
        self.owner: weakref.ref[Any] | None = None


class Left(NamedTuple):
    """Backward calls of one line that were cleared together before a step had used them."""

    site: CallSite | None  # None where they are of several
    calls: int
    zero: CallSite | None
    owner: weakref.ref[Any] | None


class Rest:
    """Backward calls that are cleared between two whole accumulations: fewer than a step waits for, and always as many.

    Attributes:
        whole: how many the last step has used.
    """

    __slots__ = ("_in_a_row", "_left", "_seen", "whole")

    def __init__(self) -> None:
        self.whole = 0
        self._in_a_row = 0  # steps that have used as many
        self._left: list[Left] = []  # since the last step
        self._seen: dict[tuple[CallSite | None, int, int], list[int]] = {}  # steps at which the same was left

    def used(self, calls: int) -> None:
        """A step uses what has been added up."""
        self._in_a_row = self._in_a_row + 1 if calls == self.whole else 1
        self.whole = calls

    def cleared(self, sites: set[CallSite | None], calls: int, zero: CallSite | None, owner: weakref.ref[Any] | None) -> None:
        """Contributions that no step has used are cleared."""
        self._left = [*self._left[-1:], Left(sites.pop() if len(sites) == 1 else None, calls, zero, owner)]

    def repeated(self, site: CallSite | None, step: int) -> Left | None:
        """What was left before the step that has just been taken, where this happens time after time.

        Args:
            site: of the backward calls that the step has used.
            step: the optimizer's.
        """
        left, self._left = self._left, []
        if len(left) != 1 or self._in_a_row < 2 or site is None or left[0].site != site or left[0].calls >= self.whole:
            return None
        at = self._seen.setdefault((left[0].zero, left[0].calls, self.whole), [1])
        at.append(step)
        # as many steps as before it: epochs are alike, and a batch that is given up now and then is not
        if len(at) not in (3, 4) or at[-1] - at[-2] != at[-2] - at[-3]:
            return None
        at.append(0)  # said
        return left[0]


class Slot:
    """One followed parameter of one optimizer."""

    __slots__ = ("grad", "hand", "parts", "ref", "used", "version")

    def __init__(self, parameter: torch.Tensor) -> None:
        self.ref = TensorRef(parameter)
        self.grad = 0  # id of the gradient when last looked at; 0 for none
        self.version = 0
        self.parts: list[Part] = []  # contributions no step has used
        self.used: Part | None = None  # the gradient still holds what a step has used; the last of it
        self.hand: tuple[weakref.ref[Any], list[float]] | None = None  # a gradient that no backward of ours made, as a step has used it

    def forget(self) -> None:
        self.grad = 0
        self.parts.clear()
        self.used = None

    def kept(self, grad: torch.Tensor) -> bool:
        """Whether a gradient that was set by hand is the one that the step before has used, value by value."""
        known, values = self.hand, few_values(grad)
        self.hand = (TensorRef(grad), values)
        return known is not None and known[0]() is grad and any(values) and known[1] == values

    def lose(self) -> None:
        """The gradient was taken away or replaced by other means than zero_grad."""
        for part in self.parts:
            part.unknown += 1
        self.forget()


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

    def note(self, rate: float) -> None:
        """The rate at a look."""
        if rate > self.highest:
            self.highest = rate
        if rate < _A_LOT * self.last:
            self.cuts += 1
            self.falling += 1
            self.falls = max(self.falls, self.falling)
        else:
            self.falling = 0
        self.last = rate


class Book:
    """What is known of one optimizer."""

    def __init__(self, optimizer: Any, ended: Any = None) -> None:
        self.ref: weakref.ref[Any] = UncountedRef(optimizer, None if ended is None else lambda _: ended(self))
        self.key = id(optimizer)
        self.type_name = type(optimizer).__name__
        self.made: CallSite | None = None
        self.loaded: CallSite | None = None  # the last load_state_dict
        self.made_at = 0  # the ledger's clock
        self.steps = 0
        self.step_site: CallSite | None = None
        self.zero_site: CallSite | None = None
        self.zeros = 0
        self.zeroed_at_step = 0  # this optimizer's step count when it was last zeroed
        self.idle_zero: CallSite | None = None  # a zero_grad that had nothing to clear, right after another
        self.filled = 0  # backward calls that gave it gradient
        self.filled_since_step = 0
        self.last_used: Part | None = None  # the newest contribution that a step has used
        self.last_part: Part | None = None
        self.wasted: dict[CallSite | None, Waste] = {}  # since the last step, by the line of the backward call
        self.clipped_late: CallSite | None = None  # where gradients were clipped that its last step had used
        self.idle_at = 0  # steps at which calls of what never has a gradient have been looked at
        self.rounds = 0  # steps in a row that used one backward call of a line of which others were wasted
        self.stale = 0
        self.repeated = 0
        self.kept = 0  # steps in a row on one and the same gradients, set by hand
        self.empty = 0  # steps in a row for which no followed parameter had a gradient
        self.by_hand = False  # gradients are zeroed through `.data`, unseen by version counters
        self.backwards_at_step = 0  # the ledger's count at the last step
        self.backwards_asleep = -1  # the same while no gradients are followed
        self.habit = Habit()
        self.followed_from = 0  # this optimizer's step since which gradients are followed without a gap
        self.same_line = 0  # backward calls of the step all made by one line, unscaled means
        self.rates = Rates()
        self.rest = Rest()
        self.shared = 0
        self.sharing: list[Book] = []
        self.nested = False  # steps inside another optimizer's step()
        self.prepared: list[Prepared] = []
        self.fit: Any = None  # Lightning's, where it was made for one under manual optimization
        self.gathered: dict[str, Any] = {}  # names, taken while the frames were alive
        self.first_versions: list[tuple[weakref.ref[Any], int]] = []
        self.frozen_at_first: list[weakref.ref[Any]] = []  # parameters that did not require grad when first seen
        self.frozen: list[tuple[weakref.ref[Any], list[float]]] = []  # between a survey and the next step
        self.frozen_at = 0
        self.said_moving = False
        self.close_until = _CLOSE_STEPS
        self.slots: list[Slot] = []
        self.active: list[Slot] = []
        self.size = -1
        self.follow()

    def parameters(self) -> list[torch.Tensor]:
        """All of the optimizer's parameters."""
        optimizer = self.ref()
        if optimizer is None:
            return []
        return [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, torch.Tensor)]

    def passed(self, rates: Iterable[Any]) -> None:
        """The optimizer is about to be gone, with steps that went by unseen: there is nothing to judge.

        Args:
            rates: its learning rate at each of them.
        """
        for rate in rates:
            self.steps += 1
            if not self.steps % LOOK_EVERY and type(rate) in (float, int):
                self.rates.highest = max(self.rates.highest, rate)
                self.rates.zero = 0 if rate else self.rates.zero + LOOK_EVERY

    def switched_off(self, all_of_it: bool = False) -> list[weakref.ref[Any]]:
        """The parameters that required grad when they were first seen and are frozen now, without a gradient: where they are only some of
        them, or where they are all.
        """
        at_first = {id(ref()) for ref in self.frozen_at_first}
        known = [(ref, p) for ref, _ in self.first_versions if (p := ref()) is not None and id(p) not in at_first]
        off = [ref for ref, p in known if not p.requires_grad and p.grad is None]
        return off if (len(off) == len(known)) is all_of_it else []

    def follow(self) -> None:
        """Chooses the parameters to follow."""
        optimizer = self.ref()
        if optimizer is None:
            return
        groups = elements(peek(optimizer, "param_groups"))
        size = sum(len(group["params"]) for group in groups)
        close = self.steps < self.close_until
        if size != self.size:
            known = {id(slot.ref()): slot for slot in self.slots}
            parameters = self.parameters()
            if len(parameters) > _MOST_FOLLOWED:
                stride = len(parameters) / _MOST_FOLLOWED
                parameters = [parameters[int(i * stride)] for i in range(_MOST_FOLLOWED)]
            self.slots = [known.get(id(p)) or Slot(p) for p in parameters]
            if self.size < 0:
                self.first_versions = [(TensorRef(p), version_of(p)) for p in self.parameters()]
                self.frozen_at_first = [ref for ref, _ in self.first_versions if (p := ref()) is not None and not p.requires_grad]
            else:
                seen = {id(ref()) for ref, _ in self.first_versions}
                self.first_versions += [(TensorRef(p), version_of(p)) for p in self.parameters() if id(p) not in seen]
            self.size = size
            self.active = []
            self.habit.watch([slot.ref for slot in (self.slots if len(self.slots) <= _FOLLOWED else self._few())])
        if close or len(self.slots) <= _FOLLOWED:
            if len(self.active) != len(self.slots):
                for slot in self.slots:
                    if slot not in self.active:
                        slot.forget()
                self.active = self.slots
        elif len(self.active) != _FOLLOWED:
            self.active = self._few()

    def _few(self) -> list[Slot]:
        return [self.slots[0], self.slots[len(self.slots) // 2], self.slots[-1]]

    # -- the gradients of the parameters that are followed -------------------------------------------------------------

    def notice_hands(self) -> None:
        """A backward call begins: what happened to gradients since they were looked at last was no backward of ours and no zero_grad."""
        for slot in self.active:
            if slot.grad:
                parameter = slot.ref()
                grad = None if parameter is None else parameter.grad
                if grad is None:
                    slot.lose()
                elif id(grad) != slot.grad:
                    slot.lose()
                    slot.grad = id(grad)
                    slot.version = version_of(grad)
                elif version_of(grad) != slot.version:
                    slot.version = version_of(grad)
                    slot.used = None  # written by hand: zeroed, most likely
                elif self.stale and slot.used is not None and not bool(grad.any()):
                    slot.used = None
                    self.by_hand = True

    def fill(self, part: Part | None, call: BackwardFact, journal: Journal) -> Part | None:
        """A backward call has returned: which of the parameters it gave gradient to.

        Args:
            part: what the call gave to other optimizers' parameters.

        Returns:
            The same with what it gave to these; then it is `last_part` too.
        """
        got, taken = False, 0
        for slot in self.active:
            parameter = slot.ref()
            if parameter is None:
                continue
            grad = parameter.grad
            if grad is None:
                if slot.grad:
                    slot.lose()
                continue
            key, version = id(grad), version_of(grad)
            if key != slot.grad or version != slot.version:
                if part is None:
                    part = Part(call, journal.grad_reads)
                slot.grad = key
                slot.version = version
                parts = slot.parts
                if len(parts) < _MOST_PARTS:
                    part.filled += 1
                    parts.append(part)
                    taken += 1
                if not got:
                    got = True
                    share = part.shares.setdefault(self.key, Share(slot.ref, version_of(parameter)))
        if got:
            self.filled += 1
            self.filled_since_step += 1
            self.last_part = part
            share.filled += taken
        return part

    def clear(self, wasted: dict[Part, None]) -> bool:
        """zero_grad has returned: whether it cleared anything; parts of which this optimizer's steps have used nothing, and none will, go
        into `wasted`."""
        cleared = False
        for slot in self.active:
            if not slot.grad:
                continue
            parameter = slot.ref()
            grad = None if parameter is None else parameter.grad
            if grad is None or id(grad) != slot.grad or version_of(grad) != slot.version:
                cleared = True
                for part in slot.parts:
                    part.cleared += 1
                    share = part.shares[self.key]
                    share.cleared += 1
                    if share.wasted and not part.unknown:
                        wasted[part] = None
                slot.parts.clear()
                slot.used = None
                if grad is None:
                    slot.grad = 0
                else:
                    slot.grad, slot.version = id(grad), version_of(grad)
        return cleared

    def use(self) -> tuple[int, int, int, bool]:
        """The optimizer has stepped: how many parameters had new gradients, the same as in its last step, none; whether any new one
        came on top of one that was used before."""
        stale = False
        fresh = same = none = kept = 0
        for slot in self.active:
            parameter = slot.ref()
            if parameter is None:
                continue
            grad = parameter.grad
            if grad is None:
                none += 1
                if slot.grad:  # the step itself cleared it
                    for part in slot.parts:
                        self._use(part)
                    fresh += 1
                    slot.forget()
                continue
            parts = slot.parts
            if parts:
                fresh += 1
                stale = stale or slot.used is not None
                for part in parts:
                    self._use(part)
                slot.used = self.last_used = parts[-1]
                slot.parts = []
            elif slot.used is not None and slot.grad == id(grad) and (slot.version == version_of(grad) or self.clipped_late is not None):
                same += 1
            else:
                slot.used = None  # a gradient that was set by hand
                kept += slot.kept(grad)
            slot.grad = id(grad)
            slot.version = version_of(grad)
        self.kept = self.kept + 1 if kept and kept + none == len(self.active) else 0
        return fresh, same, none, stale

    def _use(self, part: Part) -> None:
        part.used += 1
        part.shares[self.key].used += 1

    def look_closely(self, steps: int = 3) -> None:
        """Follows every parameter for some steps: something looks odd."""
        self.close_until = max(self.close_until, self.steps + steps)
        self.follow()


@dataclass
class Prepared:
    """A diagnosis made while names were at hand, to be said at the end of training if it still holds.

    Attributes:
        code: the rule's.
        diagnosis: what to say.
        holds: asked at the end; plain facts and weak references only.
    """

    code: str
    diagnosis: Any
    holds: Callable[[], bool]


def unchanged(book: Book) -> bool:
    """Whether no parameter of the optimizer was written since it was first seen."""
    known = [(p, version) for ref, version in book.first_versions if (p := ref()) is not None]
    return bool(known) and all(version_of(p) == version for p, version in known)


def rate_of(optimizer: Any) -> Any:
    """The learning rate of an optimizer's first group, None where it has neither; where that is zero, the highest of all groups."""
    groups = optimizer.param_groups
    rate = groups[0].get("lr") if groups else None
    if type(rate) in (int, float) and rate == 0 and len(groups) > 1:
        return max((other for group in groups if type(other := group.get("lr")) in (int, float)), default=rate)
    return rate
