"""The ledger between two windows in which gradients are followed: it only counts, and can look away for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradguard.core.callsite import CallSite
from gradguard.instrumentation.event_buffer import Where
from gradguard.monitors.optimizer_books import LOOK_EVERY
from gradguard.monitors.retained_graphs import RAREST, tag_due
from gradguard.monitors.surveys import SURVEYS

if TYPE_CHECKING:
    from gradguard.monitors.gradient_ledger import Ledger

_FAR = 1_000_000
_CLOSER = 24  # steps that gradients are followed for after one that is unlike those before


def ahead(ledger: Ledger) -> tuple[int, int]:
    """Optimizer steps and backward calls that can go by from here without a look at any tensor; none while anything is watched."""
    if not ledger.asleep or ledger.ended or ledger.found or ledger.census_until or ledger.recorder is not None or ledger.scaling.on:
        return 0, 0
    if ledger.modes.watching or any(book.frozen for book in ledger.books.values()):
        return 0, 0
    steps = ledger.turn_at - ledger.steps
    if ledger.survey_again > ledger.steps:
        steps = min(steps, ledger.survey_again - ledger.steps)
    for book in ledger.books.values():
        steps = min(steps, min((survey - book.steps for survey in SURVEYS if survey > book.steps), default=_FAR))
    tag = next((count for count in range(1, RAREST + 1) if tag_due(ledger.backwards + count)), _FAR)
    return steps - 1, min(ledger.next_survey - ledger.backwards, tag) - 1


def step(ledger: Ledger, optimizer: Any, site: CallSite | None) -> bool:
    """Counts an optimizer's step; whether rules have to be asked."""
    ledger.steps += 1
    book = ledger.books.get(id(optimizer)) or ledger.book_of(optimizer)
    book.steps += 1
    if not book.steps % LOOK_EVERY:
        book.step_site = site
        ledger.report(ledger.schedules.look(book, optimizer, ledger, LOOK_EVERY))
    if book.frozen:
        ledger.report(ledger.frozen_moves.look(book))
    if ledger.survey_due(book):
        ledger.report(ledger.survey.look(book, ledger))
        ledger.report(ledger.schedules.swings(book, ledger))
    if ledger.modes.watching:
        ledger.report(ledger.modes.look(book))
    if ledger.recorder is not None:
        ledger.recorder.look(book)
    again = book.backwards_asleep == ledger.backwards and ledger.alarms and ledger.steps > 1
    if again:  # stepped again, or stepped without gradients
        ledger.alarms -= 1
    if book.habit.leave(book.steps) or again:
        ledger.wake(_CLOSER)
    book.backwards_asleep = ledger.backwards
    if ledger.steps >= ledger.turn_at:
        ledger.wake()
        book.step_site = site
    return bool(ledger.found or ledger.ended or ledger.census_until)


def coasted(ledger: Ledger, key: int, optimizer: Any, where: Where, rate: Any) -> None:
    """Counts a step that went by unseen: by then nothing was due.

    Args:
        key: the optimizer's id.
        optimizer: None where it has died since, which has settled its book.
        rate: its learning rate when it stepped.
    """
    ledger.steps += 1
    book = ledger.books.get(key)
    if book is None or optimizer is None or book.ref() is not optimizer:
        return
    book.steps += 1
    book.backwards_asleep = ledger.backwards
    if not book.steps % LOOK_EVERY:
        book.step_site = None if where[0] is None else CallSite(where[0], where[1])
        ledger.report(ledger.schedules.look(book, optimizer, ledger, LOOK_EVERY, rate))
