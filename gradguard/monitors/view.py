"""What monitors see of a run: its optimizers, how far it has come, and what was found."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from gradguard.core.callsite import CallSite
from gradguard.core.foreign_exceptions import internal_error
from gradguard.instrumentation.event_buffer import Coast
from gradguard.instrumentation.facts import BackwardFact
from gradguard.instrumentation.journal import current_journal
from gradguard.monitors.findings import Finding
from gradguard.monitors.optimizer_books import Book, unchanged
from gradguard.monitors.untrained_leaves import Stranger
from gradguard.torch_compat.private_api import quiet

AWAKE_FIRST = 64
AWAKE = 8


class View:
    """The state of a run that its monitors share.

    Args:
        options: a rule's thresholds and windows (its `Options`), by its code.
    """

    def __init__(self, options: Callable[[str], Any]) -> None:
        self.options = options
        self.journal = current_journal()
        self.began_at = self.journal.tick()  # what the thread did before is another training's
        self.books: dict[int, Book] = {}
        self.ended: list[Book] = []  # optimizers that died since we looked last
        self.backwards = 0
        self.steps = 0
        self.stepping: list[int] = []  # optimizers inside whose step() we are
        self.last_zero: tuple[CallSite | None, int, int] | None = None  # site, backwards, steps
        self.zeroed_by: weakref.ref[Any] | None = None  # whose zero_grad() that was
        self.found: list[Finding] = []
        self.asleep = False  # between two windows in which gradients are followed (`gradguard.monitors.idle_ledger`)
        self.turn_at = AWAKE_FIRST  # steps at which it falls asleep, or wakes up
        self.alarms = 2  # times that a step without a backward call may still wake it up
        self.coast: Coast | None = None  # under way, with steps that are yet to be counted
        self.census_until = 0  # steps
        self.strangers: dict[int, Stranger] = {}  # leaves that get gradient and are in no optimizer
        self.next_survey = 2  # backward calls at which leaves are looked at
        self.survey_again = 0  # steps at which everything is looked at once more
        self.stale_ids = True
        self._trained: set[int] = set()

    def report(self, found: Iterable[Finding] | None) -> None:
        """Takes what a monitor has found; None where it has failed."""
        if found:
            self.found += found

    def trained_ids(self) -> set[int]:
        """ids of every optimizer's parameters."""
        if self.stale_ids:
            self._trained = {id(p) for book in self.books.values() for p in book.parameters()}
            self.stale_ids = False
        return self._trained

    def calls(self) -> list[BackwardFact]:
        """The last backward calls of this run, oldest first."""
        return [call for call in self.journal.backwards if call.clock > self.began_at]

    def seek_cuts(self, parameters: list[weakref.ref[Any]]) -> None:
        """In the next steps, looks for what cuts these parameters off."""
        raise NotImplementedError

    def wake(self, steps: int = AWAKE) -> None:
        """Follows gradients for some steps from here on."""
        if self.asleep:
            self.asleep = False
            for book in self.books.values():
                book.backwards_at_step = self.backwards
                book.filled_since_step = book.same_line = 0
                book.followed_from = book.steps
                for slot in book.slots:
                    slot.forget()
        self.turn_at = max(self.turn_at, self.steps + steps)

    # -- optimizers ---------------------------------------------------------------------------------------------------

    def book_of(self, optimizer: Any) -> Book:
        """The book of an optimizer, opened if need be."""
        book = self.books.get(id(optimizer))
        if book is None or book.ref() is not optimizer:
            book = self.books[id(optimizer)] = Book(optimizer, self._died)
            book.made_at = self.steps
            self.stale_ids = True
            if len(self.books) > 64:
                for key in [key for key, each in self.books.items() if each.ref() is None]:
                    del self.books[key]
        return book

    def _died(self, book: Book) -> None:
        """An optimizer is being destroyed: the last moment at which its parameters can be looked at."""
        if sys.is_finalizing():  # C++ keeps no Python object alive any more: PyTorch aborts where a view outlives its base
            return
        try:
            if self.coast is not None:
                book.passed(self.coast.rates_of(book.key))
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
