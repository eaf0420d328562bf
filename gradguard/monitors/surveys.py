"""Surveys: now and then, which leaves a backward fills, which parameters no step has ever changed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gradguard.core.callsite import CallSite, user_frame
from gradguard.core.safe_read import variables_of
from gradguard.instrumentation.fault_barrier import barred
from gradguard.instrumentation.tensor_refs import TensorRef
from gradguard.monitors.findings import Finding
from gradguard.monitors.monitor import Backward, Monitor, Step
from gradguard.monitors.tensor_state import few_values, version_of
from gradguard.monitors.untrained_leaves import Stranger, leaves
from gradguard.monitors.without_optimizer import Unheld

if TYPE_CHECKING:
    from gradguard.instrumentation.journal import Journal
    from gradguard.monitors.optimizer_books import Book
    from gradguard.monitors.view import View

SURVEYS = frozenset({3, 12, 24, 60, 150, 400, 1000, 4000})  # an optimizer's steps after which everything is looked at
_MOST_STRANGERS = 2_000
_ANEW = 4  # looks
_LATE, _SOON = 12, 8  # steps: a parameter that is unfrozen, or added, after the first look is looked for again so soon


class Making(NamedTuple):
    """How a parameter came to be: with a module, or in the course of a forward call.

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
    """Parameters that required grad when first seen, and do no more: some of the optimizer's, or all of them while it goes on stepping."""

    CODE = "GG605"

    parameters: list[weakref.ref[Any]]


@dataclass(frozen=True, eq=False)
class FrozenAtZero(Finding):
    """Matrices that are all zeros and were frozen, by a statement that froze others with them."""

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


class KeptGraphsDue(Finding):
    """The variables around a step are to be looked at: does the graph of one grow with each step?"""

    CODE = "GG608"
    ROUTINE = True


class CopiesDue(Finding):
    """Copies of what an optimizer trains are to be looked for, which an average may be meant to move."""

    CODE = "GG611"
    ROUTINE = True


_CALL = getattr(torch.nn.Module._call_impl, "__code__", None)


def making(module: torch.nn.Module, name: str, frame: FrameType | None) -> Making | None:
    """How a parameter was made that a module is being given; None where neither a module is being constructed nor one's forward runs."""
    caller = user_frame(frame)
    built = False
    while frame is not None and frame.f_code is not _CALL:
        if frame.f_code.co_name == "__init__" and isinstance(variables_of(frame).get("self"), torch.nn.Module):
            caller, built = user_frame(frame.f_back), True
        frame = frame.f_back
    if caller is None or (frame is None and not built):
        return None
    return Making(CallSite(caller.f_code, caller.f_lasti), None if built else name, type(module).__name__)


class Survey(Monitor):
    """The surveys of a run."""

    PART = "look-out for parameters without an optimizer"
    ASLEEP = True

    def __init__(self) -> None:
        self._gap = 1.0
        self._unheld = Unheld()
        self._anew = 0  # looks in a row at which other parameters were there in the place of those of the look before
        self._makings: dict[int, Making] = {}  # by id of the parameter, while they come and go
        self._resets = 3

    @barred
    def often(self, view: View) -> None:
        """Something new has begun: the next backward calls are looked at again."""
        self._gap = 1.0
        view.next_survey = min(view.next_survey, view.backwards + 2)

    @property
    def watches_making(self) -> bool:
        """Whether parameters come and go, and where they are made is yet to be seen."""
        return 0 < self._anew < _ANEW

    def registered(self, module: torch.nn.Module, name: str, parameter: Any, frame: FrameType | None) -> None:
        """A module is given a parameter."""
        made = making(module, name, frame) if isinstance(parameter, torch.nn.Parameter) else None
        if made is None:
            self._makings.pop(id(parameter), None)  # another's id by now
        else:
            if len(self._makings) >= _MOST_STRANGERS:
                self._makings.clear()
            self._makings[id(parameter)] = made

    def on_backward(self, event: Backward, view: View) -> Sequence[Finding]:
        """Looks through the graph that backward has just gone through for leaves that no optimizer knows."""
        if view.backwards < view.next_survey:
            return ()
        self._gap = min(self._gap * 1.5, 2000.0)
        view.next_survey = view.backwards + int(self._gap)
        view.stale_ids = True  # groups may have been added
        known = view.trained_ids()
        found: dict[int, Stranger] = {}
        if view.books:
            self._meet(leaves(event.roots), known, found, view)
            findings = self._replaced([s for s in found.values() if s.is_parameter and s.first_backward == view.backwards], view)
        else:
            findings = self._unheld.look(view.backwards, leaves(event.roots))
        for key, stranger in view.strangers.items():  # another backward's may fill them
            if key not in found and key not in known and stranger.ref() is not None and len(found) < _MOST_STRANGERS:
                found[key] = stranger
        view.strangers = found
        return findings

    def _meet(self, met: list[torch.Tensor], known: set[int], found: dict[int, Stranger], view: View) -> None:
        """Which of the leaves that a backward has met are in no optimizer."""
        now = view.backwards
        for leaf in met:
            if id(leaf) in known or leaf.grad is None:
                continue
            stranger = view.strangers.get(id(leaf))
            if stranger is None or stranger.ref() is not leaf:
                stranger = Stranger(leaf, now, view.steps)
                if stranger.is_parameter and view.steps > _LATE and self._resets and view.survey_again < view.steps:
                    self._resets -= 1  # unfrozen just now, or added: looked at again soon
                    self._gap, view.survey_again = 1.0, view.steps + _SOON
                    view.next_survey = now + 1
            else:
                stranger.seen += 1
                stranger.last_backward = now
            found[id(leaf)] = stranger
            if len(found) >= _MOST_STRANGERS:
                break

    def _replaced(self, fresh: list[Stranger], view: View) -> list[Finding]:
        """Whether parameters that no optimizer knows come and go: a layer that is made where it is called."""
        gone = {s.shape for s in view.strangers.values() if s.is_parameter and s.seen == 1 and s.ref() is None}
        shapes = [s.shape for s in fresh if s.shape in gone]
        self._anew = self._anew + 1 if shapes else 0
        book = next((book for book in view.books.values() if book.filled and book.steps and book.last_part is not None), None)
        if self._anew != _ANEW or book is None:
            return []
        ours = {tuple(p.shape) for each in view.books.values() for p in each.parameters()}
        makings = [self._makings.get(key) for s in fresh if s.shape in gone and (key := id(s.ref()))]
        self._makings.clear()
        # else they may be copies, fitted by hand
        return [MadeAnew(book, shapes, makings)] if any(shape not in ours for shape in shapes) else []

    def on_step(self, event: Step, view: View) -> Sequence[Finding]:
        if event.survey:
            return list(self._survey(event.book, view))
        return list(self._idle(event.book, view)) if event.book.steps == event.book.idle_at else ()

    @barred
    def look(self, book: Book, view: View) -> list[Finding]:
        """One of the steps at which everything of an optimizer is looked at."""
        return list(self._survey(book, view))

    def _survey(self, book: Book, view: View) -> Iterator[Finding]:
        yield from (FrozenModesDue(book), FreezesDue(book), SharedMemoryDue(book), KeptGraphsDue(book))
        book.frozen = [(TensorRef(p), few_values(p)) for p in book.parameters() if not p.requires_grad and p.grad is not None]
        if book.frozen:
            book.frozen_at = book.steps
            if view.asleep:
                view.wake(2)
        if book.steps < 12:
            return
        yield CopiesDue(book)
        again, view.survey_again = view.survey_again == view.steps, 0 if view.survey_again == view.steps else view.survey_again
        yield from self._idle(book, view)
        if again or book.steps in (12, 24, 60, 400):
            known = view.trained_ids()
            left_out = [s for key, s in view.strangers.items() if key not in known and s.seen >= 3 and s.same()]
            if left_out:
                yield LeftOut(book, left_out)

    def _idle(self, book: Book, view: View) -> Iterator[Finding]:
        """Which of an optimizer's parameters have never had a gradient, while others had."""
        idle = [
            ref
            for ref, version in book.first_versions
            if (p := ref()) is not None and p.requires_grad and p.grad is None and version_of(p) == version
        ]
        partly = 0 < len(idle) < len(book.first_versions)
        zeros = frozen_at_zero(view.journal) if book.steps in (12, book.idle_at) else []
        if book.steps == 12 and (partly or zeros):
            view.seek_cuts([*(idle if partly else ()), *zeros])
            book.idle_at = book.steps + 4
            return
        if partly and book.steps in (12, book.idle_at, 24, 60, 400):
            yield NeverFilled(book, idle)
        elif book.steps != book.idle_at and (off := book.switched_off()):
            yield SwitchedOff(book, off)
        if zeros:
            yield FrozenAtZero(book, zeros)


def frozen_at_zero(journal: Journal) -> list[weakref.ref[Any]]:
    """What lets nothing through for as long as it is frozen: matrices, such as adapters begin with, that went into a freeze of many."""
    frozen: dict[CallSite, list[torch.Tensor]] = {}
    for ref, on, site, *_ in journal.toggles.values():
        parameter = ref()
        if type(parameter) is torch.nn.Parameter and site is not None and not on and not parameter.requires_grad:
            frozen.setdefault(site, []).append(parameter)
    found: list[weakref.ref[Any]] = []
    for together in frozen.values():
        zeros = [p for p in together if p.dim() > 1 and (few := few_values(p)) and not any(few) and not bool(p.detach().any())]
        found += [TensorRef(p) for p in zeros] if len(zeros) < len(together) else ()
    return found
