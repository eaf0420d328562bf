"""Surveys: now and then, which leaves a backward fills, which parameters no step has ever changed."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gradguard.core.callsite import CallSite, user_frame
from gradguard.core.safe_read import variables_of
from gradguard.instrumentation.facts import BackwardFact
from gradguard.instrumentation.fault_barrier import barred
from gradguard.instrumentation.tensor_refs import TensorRef
from gradguard.monitors.findings import Finding
from gradguard.monitors.tensor_state import few_values, version_of
from gradguard.monitors.without_optimizer import Unheld

if TYPE_CHECKING:
    from gradguard.monitors.gradient_ledger import Ledger
    from gradguard.monitors.optimizer_books import Book

SURVEYS = frozenset({3, 12, 24, 60, 150, 400, 1000, 4000})  # an optimizer's steps after which everything is looked at
_MOST_NODES = 20_000
_MOST_STRANGERS = 2_000
_ANEW = 4  # looks
_LATE, _SOON = 12, 8  # steps: a parameter that is unfrozen, or added, after the first look is looked for again so soon


class Stranger:
    """A leaf that gets gradient and is in no optimizer."""

    __slots__ = ("first_backward", "is_parameter", "last_backward", "ref", "seen", "shape", "step", "values", "version")

    def __init__(self, leaf: torch.Tensor, backward: int, step: int) -> None:
        self.ref = TensorRef(leaf)
        self.shape = tuple(leaf.shape)
        self.is_parameter = isinstance(leaf, torch.nn.Parameter)
        self.version = version_of(leaf)
        self.values = few_values(leaf)
        self.seen = 1
        self.first_backward = self.last_backward = backward
        self.step = step

    def same(self) -> bool:
        """Whether it lives and has not changed since it was first seen (written through `.data` included)."""
        leaf = self.ref()
        return leaf is not None and version_of(leaf) == self.version and few_values(leaf) == self.values


class Making(NamedTuple):
    """How a parameter came to be: in the course of a module's forward call.

    Attributes:
        site: the user's line: the call that constructs a module, or what gives a module a parameter.
        attribute: what the parameter is called in its module, where no module was constructed.
        owner: the type of the module that has it.
    """

    site: CallSite
    attribute: str | None
    owner: str


@dataclass(frozen=True, eq=False)
class MadeAnew(Finding):
    """Parameters that no optimizer knows come and go."""

    CODE = "GG603"

    shapes: list[tuple[int, ...]]
    makings: list[Making | None]


@dataclass(frozen=True, eq=False)
class LeftOut(Finding):
    """Leaves that get gradient, are in no optimizer and never change."""

    CODE = "GG603"

    strangers: list[Stranger]


@dataclass(frozen=True, eq=False)
class NeverFilled(Finding):
    """Parameters of an optimizer that have never had a gradient, while others had."""

    CODE = "GG605"

    parameters: list[weakref.ref[Any]]


@dataclass(frozen=True, eq=False)
class SwitchedOff(Finding):
    """Parameters that required grad when first seen, and do no more."""

    CODE = "GG605"

    parameters: list[weakref.ref[Any]]


class FrozenModesDue(Finding):
    """An optimizer's modules are to be looked at: do frozen ones act as in training?"""

    CODE = "GG609"
    ROUTINE = True


class FreezesDue(Finding):
    """An optimizer's parameters are to be looked at: are any meant to be frozen?"""

    CODE = "GG613"
    ROUTINE = True


class SharedMemoryDue(Finding):
    """An optimizer's parameters are to be looked at: do two share their memory?"""

    CODE = "GG615"
    ROUTINE = True


class CopiesDue(Finding):
    """Copies of what an optimizer trains are to be looked for."""

    CODE = "GG611"
    ROUTINE = True


_CALL = getattr(torch.nn.Module._call_impl, "__code__", None)


def making(module: torch.nn.Module, name: str, frame: FrameType | None) -> Making | None:
    """How a parameter was made that a module is being given; None outside of any forward call."""
    caller = user_frame(frame)
    built = False
    while frame is not None and frame.f_code is not _CALL:
        if frame.f_code.co_name == "__init__" and isinstance(variables_of(frame).get("self"), torch.nn.Module):
            caller, built = user_frame(frame.f_back), True
        frame = frame.f_back
    if frame is None or caller is None:
        return None
    return Making(CallSite(caller.f_code, caller.f_lasti), None if built else name, type(module).__name__)


class Survey:
    """The surveys of a run."""

    PART = "look-out for parameters without an optimizer"

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = weakref.ref(ledger)
        self.next_at = 2
        self._gap = 1.0
        self.strangers: dict[int, Stranger] = {}
        self.unheld = Unheld()
        self.stale_ids = True
        self._known: set[int] = set()
        self.anew = 0  # looks in a row at which other parameters were there in the place of those of the look before
        self.makings: dict[int, Making] = {}  # by id of the parameter, while they come and go
        self.again = 0  # steps at which everything is looked at once more
        self._resets = 3

    @barred
    def often(self, now: int) -> None:
        """Something new has begun: the next backward calls are looked at again."""
        self._gap = 1.0
        self.next_at = min(self.next_at, now + 2)

    @property
    def watches_making(self) -> bool:
        """Whether parameters come and go, and where they are made is yet to be seen."""
        return 0 < self.anew < _ANEW

    def registered(self, module: torch.nn.Module, name: str, parameter: Any, frame: FrameType | None) -> None:
        """A module is given a parameter."""
        made = making(module, name, frame) if isinstance(parameter, torch.nn.Parameter) else None
        if made is None:
            self.makings.pop(id(parameter), None)  # another's id by now
        else:
            if len(self.makings) >= _MOST_STRANGERS:
                self.makings.clear()
            self.makings[id(parameter)] = made

    def known(self) -> set[int]:
        """ids of every optimizer's parameters."""
        ledger = self._ledger()
        if ledger is not None and self.stale_ids:
            self._known = {id(p) for book in ledger.books.values() for p in book.parameters()}
            self.stale_ids = False
        return self._known

    @barred
    def walk(self, call: BackwardFact, roots: tuple[Any, ...]) -> None:
        """Looks through the graph that backward has just gone through for leaves that no optimizer knows."""
        ledger = self._ledger()
        if ledger is None:
            return
        self._gap = min(self._gap * 1.5, 2000.0)
        self.next_at = ledger.backwards + int(self._gap)
        self.stale_ids = True  # groups may have been added
        known = self.known()
        now = ledger.backwards
        found: dict[int, Stranger] = {}
        if ledger.books:
            for leaf in leaves(roots):
                if id(leaf) in known or leaf.grad is None:
                    continue
                stranger = self.strangers.get(id(leaf))
                if stranger is None or stranger.ref() is not leaf:
                    stranger = Stranger(leaf, now, ledger.steps)
                    if stranger.is_parameter and ledger.steps > _LATE and self._resets and self.again < ledger.steps:
                        self._resets -= 1  # unfrozen just now, or added: looked at again soon
                        self._gap, self.again = 1.0, ledger.steps + _SOON
                        self.next_at = ledger.backwards + 1
                else:
                    stranger.seen += 1
                    stranger.last_backward = now
                found[id(leaf)] = stranger
                if len(found) >= _MOST_STRANGERS:
                    break
            self._replaced(ledger, [s for s in found.values() if s.is_parameter and s.first_backward == now])
        else:
            self.unheld.look(ledger, leaves(roots))
        for key, stranger in self.strangers.items():  # another backward's may fill them
            if key not in found and key not in known and stranger.ref() is not None and len(found) < _MOST_STRANGERS:
                found[key] = stranger
        self.strangers = found

    def _replaced(self, ledger: Ledger, fresh: list[Stranger]) -> None:
        """Whether parameters that no optimizer knows come and go: a layer that is made where it is called."""
        gone = {s.shape for s in self.strangers.values() if s.is_parameter and s.seen == 1 and s.ref() is None}
        shapes = [s.shape for s in fresh if s.shape in gone]
        self.anew = self.anew + 1 if shapes else 0
        book = next((book for book in ledger.books.values() if book.filled and book.steps and book.last_part is not None), None)
        if self.anew != _ANEW or book is None:
            return
        ours = {tuple(p.shape) for each in ledger.books.values() for p in each.parameters()}
        if any(shape not in ours for shape in shapes):  # else they may be copies, fitted by hand
            makings = [self.makings.get(key) for s in fresh if s.shape in gone and (key := id(s.ref()))]
            ledger.found.append(MadeAnew(book, shapes, makings))
        self.makings.clear()

    @barred
    def after_step(self, book: Book) -> None:
        """One of the steps at which everything of an optimizer is looked at."""
        ledger = self._ledger()
        if ledger is None:
            return
        ledger.found += [FrozenModesDue(book), FreezesDue(book), SharedMemoryDue(book)]
        book.rates.swings(ledger, book, book.ref())
        book.frozen = [(TensorRef(p), few_values(p)) for p in book.parameters() if not p.requires_grad and p.grad is not None]
        if book.frozen:
            book.frozen_at = book.steps
            if ledger.asleep:
                ledger.wake(2)
        if book.steps < 12:
            return
        if book.steps in (12, 24):
            ledger.found.append(CopiesDue(book))
        again, self.again = self.again == ledger.steps, 0 if self.again == ledger.steps else self.again
        if book.steps in (12, 24, 60, 400):
            self.look_for_idle(book)
        if again or book.steps in (12, 24, 60, 400):
            known = self.known()
            left_out = [s for key, s in self.strangers.items() if key not in known and s.seen >= 3 and s.same()]
            if left_out:
                ledger.found.append(LeftOut(book, left_out))

    def look_for_idle(self, book: Book) -> None:
        """Which of an optimizer's parameters have never had a gradient, while others had."""
        ledger = self._ledger()
        if ledger is None:
            return
        idle = [
            ref
            for ref, version in book.first_versions
            if (p := ref()) is not None and p.requires_grad and p.grad is None and version_of(p) == version
        ]
        if idle and len(idle) < len(book.first_versions) and book.steps == 12:
            ledger.census_until = ledger.steps + 3
            ledger.severed.arm(idle)
            book.idle_at = book.steps + 4
        elif idle and len(idle) < len(book.first_versions):
            ledger.found.append(NeverFilled(book, idle))
        elif book.steps != book.idle_at and (off := book.switched_off()):
            ledger.found.append(SwitchedOff(book, off))


def leaves(roots: tuple[Any, ...]) -> list[torch.Tensor]:
    """The leaves of a graph that require grad; nothing for graphs too large to walk in a step."""
    found: list[torch.Tensor] = []
    stack = [node for root in roots if (node := getattr(root, "grad_fn", None)) is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        following = node.next_functions
        if not following:
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, torch.Tensor):
                found.append(leaf)
            continue
        for each, _ in following:
            if each is not None and each not in seen:
                seen.add(each)
                stack.append(each)
        if len(seen) > _MOST_NODES:
            return []
    return found
