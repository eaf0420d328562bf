"""What becomes of the contributions to gradients that the ledger follows, at a step, a zero_grad and a clipping."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradguard.core.callsite import CallSite
from gradguard.monitors.findings import Confirmed, Finding, TraceNext
from gradguard.monitors.lightning_fits import idle_fit
from gradguard.monitors.monitor import Backward, Clipping, Monitor, Step, Zeroing
from gradguard.monitors.optimizer_books import Book, Part, Waste
from gradguard.monitors.surveys import SwitchedOff

if TYPE_CHECKING:
    from gradguard.monitors.untrained_leaves import Stranger
    from gradguard.monitors.view import View


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
class RestCleared(Finding):
    """What is left of an accumulation at the end of an epoch is cleared, time after time.

    Attributes:
        part: the last call that a step has used.
        zero: the line that clears.
        left: how many backward calls it clears.
        whole: after how many of them the optimizer steps.
        owner: whose zero_grad() it is.
    """

    CODE = "GG602"

    part: Part
    zero: CallSite | None
    left: int
    whole: int
    owner: weakref.ref[Any] | None


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


class Contributions(Monitor):
    """What becomes of the contributions: cleared unused, used twice, none at all, clipped too late."""

    PART = "watch of contributions to gradients"

    def __init__(self) -> None:
        self.wastes: dict[tuple[CallSite | None, CallSite | None], list[int]] = {}
        self._clips: dict[CallSite | None, int] = {}

    def before_use(self, book: Book, view: View) -> Sequence[Finding]:
        book.rest.used(max((len(slot.parts) for slot in book.active), default=0))
        return ()

    def on_backward(self, event: Backward, view: View) -> list[Finding]:
        return [NoStepYet(book) for book in event.filled if not book.steps and book.filled in (10, 40, 160)]

    def on_zero_grad(self, event: Zeroing, view: View) -> list[Finding]:
        parts = list(event.parts)
        if parts and not any(part.shares[event.book.key].written() for part in parts):
            event.book.rest.cleared({part.call.site for part in parts}, len(parts), event.site, event.owner)
        return list(self._wasted(event._replace(parts=parts), view))

    def on_step(self, event: Step, view: View) -> Sequence[Finding]:
        book, found = event.book, list[Finding]()
        if event.stale and not book.by_hand:
            book.stale += 1
            if book.stale in (2, 24, 100):
                found.append(StaleGradients(book))
            book.look_closely()
        if event.fresh:
            book.empty = 0
            if book.wasted or book.rounds:
                found += _rounds(book, view)
            left = None if book.last_used is None else book.rest.repeated(book.last_used.call.site, book.steps)
            if left is not None and book.last_used is not None:
                found.append(RestCleared(book, book.last_used, left.zero, left.calls, book.rest.whole, left.owner))
        else:
            found += self._nothing_new(event, view)
        book.wasted.clear()
        book.clipped_late = None
        return found

    def on_clip(self, event: Clipping, view: View) -> Sequence[Finding]:
        return () if view.asleep else list(self._clipped(event, view))

    def on_close(self, book: Book, view: View) -> list[Finding]:
        found: list[Finding] = [Confirmed(book, prepared.diagnosis) for prepared in book.prepared if prepared.holds()]
        book.prepared.clear()
        if book.gathered.get("idle fit") and book.fit is not None:
            found.append(idle_fit(view, book))
        if not book.steps and book.filled >= 10 and book.gathered.get("unchanged"):
            found.append(NeverStepped(book))
        return found

    def _wasted(self, event: Zeroing, view: View) -> Iterator[Finding]:
        """Backward calls all of whose gradient for one optimizer was cleared before any of its steps used it."""
        book = event.book
        for part in event.parts:
            share = part.shares[book.key]
            if share.written():
                continue  # updated by hand, or SAM's ascent
            share.zero, share.owner = event.site, event.owner
            share.unread = unread = part.call.traced and part.call.step == view.journal.step and part.reads == view.journal.grad_reads
            waste = book.wasted.setdefault(part.call.site, Waste())
            waste.calls += 1
            waste.unread += unread
            waste.zero, waste.owner = event.site, event.owner
            if part.used or part.cleared != part.filled:
                continue  # another optimizer has its share of the call, as a critic has of a generator's
            key = (part.call.site, event.site)
            if len(self.wastes) > 64:
                self.wastes.clear()
            counts = self.wastes.setdefault(key, [0, 0])
            counts[0] += 1
            counts[1] += any(each.unread for each in part.shares.values())
            if counts[0] in (3, 12, 48):
                yield TraceNext(None)
            loser = _loser(part, view)
            # one that never steps is another rule's
            if counts[1] >= 2 and counts[0] >= view.options("GG602").times and loser is not None and loser.steps:
                lost = part.shares[loser.key]
                sure = len(part.shares) < 2 or _idle(loser)
                zeros = () if sure else tuple(each.zero for each in part.shares.values())
                yield ZeroedBeforeStep(loser, part, lost.zero if sure else None, counts[0], lost.owner, zeros)
                counts[1] = -40  # said; look again much later

    def _nothing_new(self, event: Step, view: View) -> Iterator[Finding]:
        """A step for which no followed parameter had a new gradient."""
        book, same, none = event.book, event.same, event.none
        if same and same + none == len(book.active):
            book.repeated += 1
            if book.clipped_late is not None:  # for this step: too late for the one before, not without effect
                self._clips[book.clipped_late] = -1_000_000
            book.look_closely(2)
            waiting = next(
                (b for b in view.books.values() if b is not book and not b.steps and b.filled_since_step and b.ref() is not None), None
            )
            if waiting is not None:
                if waiting.filled >= 5 and book.repeated >= 3:
                    yield AnotherStepped(waiting, book)
            elif book.repeated in (2, 20, 200):
                yield SameGradientsAgain(book, book.clipped_late)
        elif book.kept in (4, 40) and view.backwards > book.backwards_at_step:  # others got gradients in between
            yield GradientsKept(book)
        elif none == len(book.active):
            book.empty += 1
            yield from _empty(book, view)

    def _clipped(self, event: Clipping, view: View) -> Iterator[Finding]:
        """What if a step has used them already?"""
        site, wanted = event.site, {id(p) for p in event.parameters}
        slots = [(slot, book) for book in view.books.values() for slot in book.active if id(slot.ref()) in wanted and slot.grad]
        if any(slot.used is None and not slot.parts for slot, _ in slots):
            return  # made before the guard knew of the optimizer, or by hand: used or not is not known
        states = [(not slot.parts, book) for slot, book in slots]
        if event.limit > 1e5:  # a limit that never bites is a way to ask for the norm
            return
        if len(self._clips) > 64:
            self._clips.clear()
        if not states:
            yield from self._nothing_to_clip(event.parameters, wanted, site, view)
        elif all(used for used, _ in states):
            for _, book in states:
                book.clipped_late = site
            count = self._clips[site] = self._clips.get(site, 0) + 1
            if count == view.options("GG610").times:
                yield LateClipping(states[0][1], site)
        else:
            self._clips[site] = -1_000_000

    def _nothing_to_clip(self, parameters: list[Any], wanted: set[int], site: CallSite | None, view: View) -> Iterator[Finding]:
        """Clipping before backward: none of the parameters has a gradient, and yet each of the steps in between found some.

        Or there is no parameter at all, time after time, while an optimizer steps.
        """
        if not parameters:
            stepping = max((b for b in view.books.values() if b.steps), key=lambda b: b.steps, default=None)
            count = self._clips[site] = self._clips.get(site, 0) + 1
            if count == 3 and stepping is not None and stepping.steps >= 2:
                yield ParametersExhausted(stepping, site)
            return
        book = next((book for book in view.books.values() if any(id(slot.ref()) in wanted for slot in book.active)), None)
        if book is None or any(p.grad is not None for p in parameters):
            self._clips[site] = -1_000_000
            return
        count = self._clips[site] = self._clips.get(site, 0) + 1
        if count >= view.options("GG610").times and book.steps >= count - 1 and not book.empty and book.filled >= count - 1:
            self._clips[site] = -1_000_000
            yield NothingToClip(book, site, count)


def _loser(part: Part, view: View) -> Book | None:
    """The optimizer that a wasted backward call was to serve: of several, one that has nothing else to step on.

    None where some step uses other calls of the same line: what is lost between these is seen at the step (`_rounds`).
    """
    books = [book for key in part.shares if (book := view.books.get(key)) is not None]
    if any(book.last_used is not None and book.last_used.call.site == part.call.site for book in books):
        return None
    return next((book for book in books if _idle(book)), books[0] if books else None)


def _idle(book: Book) -> bool:
    return book.empty > 0 or (book.steps > 0 and book.last_used is None)


def _rounds(book: Book, view: View) -> Iterator[Finding]:
    """A step has used a backward call of a line whose other calls since the step before were wasted: of a sum only the last term counts."""
    part = book.last_used
    waste = None if part is None else book.wasted.get(part.call.site)
    if part is None or waste is None or waste.calls > 10_000:
        book.rounds = 0
        return
    book.rounds += 1
    if book.rounds == 1:
        yield TraceNext(None)
    if book.rounds >= 2 and book.rounds * waste.calls >= view.options("GG602").times and waste.unread == waste.calls:
        yield ZeroedBeforeStep(book, part, waste.zero, book.rounds * waste.calls, waste.owner)
        book.rounds = -40  # said; look again much later


def _empty(book: Book, view: View) -> Iterator[Finding]:
    """One more step in a row for which no followed parameter had a gradient."""
    if book.empty == 3 and book.filled_since_step and book.last_part is not None and view.last_zero is not None:
        # filled since the last step, and empty now: whoever cleared them, for whatever reason, did so too early
        yield ZeroedBeforeStep(book, book.last_part, view.last_zero[0], book.empty, view.zeroed_by)
    elif book.empty == 2:
        book.look_closely(3)
        view.next_survey = view.backwards + 1
    elif book.empty in (3, 10, 50):
        view.next_survey = view.backwards + 1
        if view.backwards == book.backwards_at_step:
            yield NoBackward(book)
            return
        if _in_their_place(book, view):
            yield TrainedInTheirPlace(book, view.strangers)
        off = book.filled and book.switched_off(all_of_it=True)
        if off and book.empty == 3:
            yield TraceNext(None)  # what switches them off, and whether anything switches them on
        elif off:
            yield SwitchedOff(book, off)
        if not book.filled and book.empty == 3:
            view.seek_cuts([slot.ref for slot in book.active])
        elif not book.filled and book.empty == 10:  # unless GG604 has found them
            yield NoPath(book, any(stranger.is_parameter for stranger in view.strangers.values()))


def _in_their_place(book: Book, view: View) -> bool:
    """Whether leaves that no optimizer knows are trained in the place of this optimizer's: they stay, or look like them."""
    shapes = {tuple(parameter.shape) for parameter in book.parameters()}
    return any(book.filled or stranger.seen > 1 or stranger.shape in shapes for stranger in view.strangers.values())


class Sharing(Monitor):
    """Two optimizers that hold some of the same parameters, and step on the very same contributions."""

    PART = "watch of shared parameters"

    def on_step(self, event: Step, view: View) -> Sequence[Finding]:
        found = self._shared(event.book, view) if event.book.sharing and event.fresh else ()
        if event.survey and len(view.books) > 1:
            _find_sharing(event.book, view)
        return found

    def _shared(self, book: Book, view: View) -> Sequence[Finding]:
        if view.stepping:
            return ()
        used = {id(slot.ref()): slot.used for slot in book.active if slot.used is not None}
        found = []
        for other in book.sharing:
            if other.nested or other.ref() is None:
                continue
            both = [
                slot.ref()
                for slot in other.active
                if slot.used is not None and used.get(id(slot.ref())) is slot.used and slot.used.used >= 2
            ]
            if both:
                book.shared += 1
                if book.shared == 3:
                    found.append(SharedParameters(book, other, max(book, other, key=lambda b: b.made_at)))
        return found


def _find_sharing(book: Book, view: View) -> None:
    """Which other optimizers hold some of the same parameters."""
    mine = {id(p) for p in book.parameters()}
    for other in view.books.values():
        if other is not book and other.steps and any(id(p) in mine for p in other.parameters()):
            if other not in book.sharing:
                book.sharing.append(other)
            if book not in other.sharing:
                other.sharing.append(book)
