"""What the ledger makes of its facts at a step or a zero_grad: suspicions for the rules."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradguard.core.callsite import CallSite
from gradguard.monitors.findings import Confirmed, Finding, TraceNext
from gradguard.monitors.lightning_fits import IdleFit
from gradguard.monitors.optimizer_books import Book, Part, Waste, unchanged

if TYPE_CHECKING:
    from gradguard.monitors.gradient_ledger import Ledger
    from gradguard.monitors.surveys import Stranger


class StaleGradients(Finding):
    """Steps use gradients on top of ones that were used before."""

    CODE = "GG601"


@dataclass(frozen=True, eq=False)
class ZeroedBeforeStep(Finding):
    """Backward calls whose gradients are cleared before any step has used them."""

    CODE = "GG602"

    part: Part
    zero: CallSite | None
    count: int
    owner: weakref.ref[Any] | None
    zeros: tuple[CallSite | None, ...] = ()


@dataclass(frozen=True, eq=False)
class TrainedInTheirPlace(Finding):
    """An optimizer's parameters get nothing, and leaves that no optimizer knows do."""

    CODE = "GG604"

    strangers: dict[int, Stranger]


class StepOnNothingNew(Finding):
    """A step for which there is no new gradient."""

    CODE = "GG606"


@dataclass(frozen=True, eq=False)
class SameGradientsAgain(StepOnNothingNew):
    """Steps apply what the step before has applied."""

    clipped: CallSite | None


class GradientsKept(StepOnNothingNew):
    """Steps go on with gradients that were set by hand and stay the same."""


class NoBackward(StepOnNothingNew):
    """No parameter has a gradient, and no backward ran."""


@dataclass(frozen=True, eq=False)
class NoPath(StepOnNothingNew):
    """backward ran, and no parameter has ever had a gradient; `fresh` where Parameters of no optimizer got some."""

    fresh: bool


class NeverStepped(Finding):
    """An optimizer gets gradients, and at the end of training it has never stepped."""

    CODE = "GG607"


class NoStepYet(Finding):
    """It has not stepped so far: names have to be taken while they are at hand."""

    CODE = "GG607"


@dataclass(frozen=True, eq=False)
class AnotherStepped(Finding):
    """Another optimizer steps twice, and this one, which waits, never."""

    CODE = "GG607"

    other: Book


@dataclass(frozen=True, eq=False)
class LateClipping(Finding):
    """Clipping that has no effect."""

    CODE = "GG610"

    site: CallSite | None


@dataclass(frozen=True, eq=False)
class NothingToClip(LateClipping):
    """None of the parameters has a gradient yet at these calls."""

    calls: int


class ParametersExhausted(LateClipping):
    """The parameters to clip are an iterator that is used up."""


@dataclass(frozen=True, eq=False)
class SharedParameters(Finding):
    """Two optimizers step on the very same contributions."""

    CODE = "GG614"

    other: Book
    later: Book


def wasted(ledger: Ledger, book: Book, parts: dict[Part, None], site: CallSite | None, owner: Any) -> None:
    """Backward calls all of whose gradient for one optimizer was cleared before any of its steps used it."""
    for part in parts:
        share = part.shares[book.key]
        if share.written():
            continue  # updated by hand, or SAM's ascent
        share.zero, share.owner = site, weakref.ref(owner)
        share.unread = unread = part.call.traced and part.call.step == ledger.journal.step and part.reads == ledger.journal.grad_reads
        waste = book.wasted.setdefault(part.call.site, Waste())
        waste.calls += 1
        waste.unread += unread
        waste.zero, waste.owner = site, share.owner
        if part.used or part.cleared != part.filled:
            continue  # another optimizer has its share of the call, as a critic has of a generator's
        key = (part.call.site, site)
        if len(ledger.wastes) > 64:
            ledger.wastes.clear()
        counts = ledger.wastes.setdefault(key, [0, 0])
        counts[0] += 1
        counts[1] += any(each.unread for each in part.shares.values())
        if counts[0] in (3, 12, 48):
            ledger.found.append(TraceNext(None))
        loser = _loser(ledger, part)
        if (
            counts[1] >= 2 and counts[0] >= ledger.options("GG602").times and loser is not None and loser.steps
        ):  # one that never steps is another rule's business
            lost = part.shares[loser.key]
            sure = len(part.shares) < 2 or _idle(loser)
            zeros = () if sure else tuple(each.zero for each in part.shares.values())
            ledger.found.append(ZeroedBeforeStep(loser, part, lost.zero if sure else None, counts[0], lost.owner, zeros))
            counts[1] = -40  # said; look again much later


def _loser(ledger: Ledger, part: Part) -> Book | None:
    """The optimizer that a wasted backward call was to serve: of several, one that has nothing else to step on.

    None where some step uses other calls of the same line: what is lost between these is seen at the step (`rounds`).
    """
    books = [book for key in part.shares if (book := ledger.books.get(key)) is not None]
    if any(book.last_used is not None and book.last_used.call.site == part.call.site for book in books):
        return None
    return next((book for book in books if _idle(book)), books[0] if books else None)


def _idle(book: Book) -> bool:
    return book.empty > 0 or (book.steps > 0 and book.last_used is None)


def rounds(ledger: Ledger, book: Book) -> None:
    """A step has used a backward call of a line whose other calls since the step before were wasted: of a sum only the last term counts."""
    part = book.last_used
    waste = None if part is None else book.wasted.get(part.call.site)
    if part is None or waste is None or waste.calls > 10_000:
        book.rounds = 0
        return
    book.rounds += 1
    if book.rounds == 1:
        ledger.found.append(TraceNext(None))
    if book.rounds >= 2 and book.rounds * waste.calls >= ledger.options("GG602").times and waste.unread == waste.calls:
        ledger.found.append(ZeroedBeforeStep(book, part, waste.zero, book.rounds * waste.calls, waste.owner))
        book.rounds = -40  # said; look again much later


def nothing_new(ledger: Ledger, book: Book, same: int, none: int) -> None:
    """A step for which no followed parameter had a new gradient."""
    if same and same + none == len(book.active):
        book.repeated += 1
        if book.clipped_late is not None:  # for this step: too late for the one before, not without effect
            ledger.clips[book.clipped_late] = -1_000_000
        book.look_closely(2)
        waiting = next(
            (b for b in ledger.books.values() if b is not book and not b.steps and b.filled_since_step and b.ref() is not None), None
        )
        if waiting is not None:
            if waiting.filled >= 5 and book.repeated >= 3:
                ledger.found.append(AnotherStepped(waiting, book))
        elif book.repeated in (2, 20, 200):
            ledger.found.append(SameGradientsAgain(book, book.clipped_late))
    elif book.kept in (4, 40) and ledger.backwards > book.backwards_at_step:  # others got gradients in between
        ledger.found.append(GradientsKept(book))
    elif none == len(book.active):
        book.empty += 1
        if book.empty == 3 and book.filled_since_step and book.last_part is not None and ledger.last_zero is not None:
            # filled since the last step, and empty now: whoever cleared them, for whatever reason, did so too early
            ledger.found.append(ZeroedBeforeStep(book, book.last_part, ledger.last_zero[0], book.empty, ledger.zeroed_by))
            return
        if book.empty == 2:
            book.look_closely(3)
            ledger.survey.next_at = ledger.backwards + 1
        elif book.empty in (3, 10, 50):
            ledger.survey.next_at = ledger.backwards + 1
            if ledger.backwards == book.backwards_at_step:
                ledger.found.append(NoBackward(book))
            elif _in_their_place(ledger, book):
                ledger.found.append(TrainedInTheirPlace(book, ledger.survey.strangers))
            if ledger.backwards != book.backwards_at_step and not book.filled and book.empty == 3:
                ledger.census_until = ledger.steps + 3
                ledger.severed.arm([slot.ref for slot in book.active])
            elif ledger.backwards != book.backwards_at_step and not book.filled and book.empty == 10:  # unless GG604 has spoken
                fresh = any(stranger.is_parameter for stranger in ledger.survey.strangers.values())
                ledger.found.append(NoPath(book, fresh))


def _in_their_place(ledger: Ledger, book: Book) -> bool:
    """Whether leaves that no optimizer knows are trained in the place of this optimizer's: they stay, or look like them."""
    strangers = ledger.survey.strangers.values()
    shapes = {tuple(parameter.shape) for parameter in book.parameters()}
    return any(book.filled or stranger.seen > 1 or stranger.shape in shapes for stranger in strangers)


def find_sharing(ledger: Ledger, book: Book) -> None:
    """Which other optimizers hold some of the same parameters."""
    mine = {id(p) for p in book.parameters()}
    for other in ledger.books.values():
        if other is not book and other.steps and any(id(p) in mine for p in other.parameters()):
            if other not in book.sharing:
                book.sharing.append(other)
            if book not in other.sharing:
                other.sharing.append(book)


def shared(ledger: Ledger, book: Book) -> None:
    """Whether another optimizer has stepped on the very same contributions."""
    if ledger.stepping:
        return
    used = {id(slot.ref()): slot.used for slot in book.active if slot.used is not None}
    for other in book.sharing:
        if other.nested or other.ref() is None:
            continue
        both = [
            slot.ref() for slot in other.active if slot.used is not None and used.get(id(slot.ref())) is slot.used and slot.used.used >= 2
        ]
        if both:
            book.shared += 1
            if book.shared == 3:
                later = max(book, other, key=lambda b: b.made_at)
                ledger.found.append(SharedParameters(book, other, later))


def clipping(ledger: Ledger, parameters: list[Any], limit: float, site: CallSite | None) -> None:
    """Gradients are about to be clipped: what if a step has used them already, or they are still scaled?"""
    ledger.scaling.clipping(ledger, parameters, limit, site)
    if ledger.asleep:
        return
    wanted = {id(p) for p in parameters}
    slots = [(slot, book) for book in ledger.books.values() for slot in book.active if id(slot.ref()) in wanted and slot.grad]
    if any(slot.used is None and not slot.parts for slot, _ in slots):
        return  # made before the guard knew of the optimizer, or by hand: used or not is not known
    states = [(not slot.parts, book) for slot, book in slots]
    if limit > 1e5:  # a limit that never bites is a way to ask for the norm
        return
    if len(ledger.clips) > 64:
        ledger.clips.clear()
    if not states:
        _nothing_to_clip(ledger, parameters, wanted, site)
        return
    if all(used for used, _ in states):
        for _, book in states:
            book.clipped_late = site
        count = ledger.clips[site] = ledger.clips.get(site, 0) + 1
        if count == ledger.options("GG610").times:
            ledger.found.append(LateClipping(states[0][1], site))
    else:
        ledger.clips[site] = -1_000_000


def _nothing_to_clip(ledger: Ledger, parameters: list[Any], wanted: set[int], site: CallSite | None) -> None:
    """Clipping before backward: none of the parameters has a gradient, and yet each of the steps in between found some.

    Or there is no parameter at all, time after time, while an optimizer steps.
    """
    if not parameters:
        stepping = max((b for b in ledger.books.values() if b.steps), key=lambda b: b.steps, default=None)
        count = ledger.clips[site] = ledger.clips.get(site, 0) + 1
        if count == 3 and stepping is not None and stepping.steps >= 2:
            ledger.found.append(ParametersExhausted(stepping, site))
        return
    book = next((book for book in ledger.books.values() if any(id(slot.ref()) in wanted for slot in book.active)), None)
    if book is None or any(p.grad is not None for p in parameters):
        ledger.clips[site] = -1_000_000
        return
    count = ledger.clips[site] = ledger.clips.get(site, 0) + 1
    if count >= ledger.options("GG610").times and book.steps >= count - 1 and not book.empty and book.filled >= count - 1:
        ledger.clips[site] = -1_000_000
        ledger.found.append(NothingToClip(book, site, count))


def closing(ledger: Ledger) -> None:
    """The guard is left: what can only be said at the end is said, if this was more than a single step."""
    ledger.finish_ended()
    for book in list(ledger.books.values()):
        if book.fit is not None and book.fit.idle(ledger):
            _idle_fit(ledger, book)
    steps = ledger.steps - ledger.opened_at
    if (steps < 10 and ledger.backwards < 10) or (steps < 10 and ledger.steps > 10 and ledger.steps < 300):
        return
    for book in list(ledger.books.values()):
        if book.ref() is not None:
            book.gathered["unchanged"] = unchanged(book)
            finish(ledger, book)


def finish(ledger: Ledger, book: Book) -> None:
    for prepared in book.prepared:
        if prepared.holds():
            ledger.found.append(Confirmed(book, prepared.diagnosis))
    book.prepared.clear()
    if book.gathered.get("idle fit") and book.fit is not None:
        _idle_fit(ledger, book)
    if not book.steps and book.filled >= 10 and book.gathered.get("unchanged"):
        ledger.found.append(NeverStepped(book))
    book.rates.finish(ledger, book)


def _idle_fit(ledger: Ledger, book: Book) -> None:
    """A fit has run, and nothing has applied what it computes; said once for all optimizers of the fit."""
    ledger.found.append(IdleFit(book, book.fit))
    fit = book.fit
    for each in (book, *ledger.books.values(), *ledger.ended):
        if each.fit is fit:
            each.fit = None
