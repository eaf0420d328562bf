"""The calm step: untraced, between two windows in which gradients are followed, with nothing odd about.

Most steps of a long training are calm, and nearly all that a guard costs there is Python that asks whether there is anything to
do. So the rules say when they have business (`Rule.idle`) and at how many backward calls they need no more than the loss
(`Rule.ahead`); that far the steps are coasted through (`instrumentation.event_buffer`), and what happened is told to the
journal, the ledger and the rules when the stretch ends: `tell`, before anything out of the ordinary is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from gradguard.core.callsite import CallSite
from gradguard.instrumentation.event_buffer import Coast, Event, Place, Where
from gradguard.instrumentation.facts import BackwardFact, StepFact
from gradguard.instrumentation.journal import Journal
from gradguard.monitors import idle_ledger
from gradguard.runtime.run import Run

_STEPS = 128  # the longest stretch: what could give a rule business from elsewhere (a replica made) can wait that long
_STACK = 12  # frames a fact keeps


class Told(NamedTuple):
    """Where a session stands after a stretch.

    Attributes:
        step: how many steps have begun.
        stepped: whether any of them began in the stretch.
        backwards: backward calls since the last one began, or since the stretch did.
        inside: whether the newest backward call has not returned.
    """

    step: int
    stepped: bool
    backwards: int
    inside: bool


def set_off(session: Any, run: Run) -> Coast | None:
    """A calm step begins: how far it may be coasted from here; None where that is not worth a list."""
    depth = run.depth.ahead()
    steps, backwards = idle_ledger.ahead(run.ledger)
    if run.metrics is not None:
        steps = min(steps, run.metrics.ahead(run.ledger))
    calls = run.calm.calls(run.notes)
    if min(depth, steps, backwards) < 2 or not calls:
        return None
    optimizers = {key: book.habit.unlike for key, book in run.ledger.books.items()}
    sizes = run.depth if run.depth.adaptive else None
    coast = Coast(session, run, min(depth, steps, _STEPS), backwards, calls, optimizers, sizes)
    run.ledger.coast = coast
    return coast


def tell(coast: Coast, journal: Journal, step: int) -> Told:
    """Tells the journal, the ledger and the rules what has been written down since step `step` began."""
    run, log = coast.run, coast.log
    ledger, depth = run.ledger, run.depth
    ledger.coast = None
    told = tuple(each.told for each in run.calm.ahead)
    journal.later(Stretch(log, journal.backward_count, [journal.tick() for _ in log], step))
    losses: dict[Place, list[float]] = {}
    newest: dict[Place, int] = {}  # of the calls at a place
    calls = journal.backward_count
    first, backwards = step, 0
    for number, event in enumerate(log):
        if number == coast.opened:
            ledger.opened()
        if event[0] == "backward":
            calls += 1
            code, lasti = event[1][0]
            place = (id(code), lasti)
            losses.setdefault(place, []).append(event[2])
            newest[place] = calls
            if not (coast.inside and number == len(log) - 1):
                backwards += 1
                ledger.backwards += 1
        elif event[0] == "step":
            idle_ledger.coasted(ledger, event[4], event[3](), event[1], event[5])
            step += 1
            backwards = 0
            depth.steps += 1
        elif (scheduler := event[2]()) is not None:
            ledger.scheduler_stepped(scheduler, _site(event[1]))
        else:
            ledger.schedules.gone(event[3])
    journal.backward_count = calls
    for place in sorted(newest, key=newest.__getitem__):  # the newest call's last: it is the one that rules may be asked about
        for tell in told:
            tell(run.notes, place, newest[place], losses[place])
    journal.step = step
    if coast.opened == len(log):
        ledger.opened()
    inside, coast.inside = coast.inside, False
    return Told(step, step > first, backwards, inside)


class Stretch:
    """What was written down in a stretch of calm steps, as facts of the journal: made when somebody asks for them.

    Args:
        log: of the `Coast`.
        calls: how many backward calls the thread had made before.
        clocks: a reading for each entry of the list.
        step: the number of the step in which the stretch began.
    """

    def __init__(self, log: list[Event], calls: int, clocks: list[int], step: int) -> None:
        self._log = log
        self._calls = calls
        self._clocks = clocks
        self._step = step

    def __len__(self) -> int:
        return len(self._log)

    def facts(self) -> Iterator[BackwardFact | StepFact]:
        """In the order of what happened."""
        calls, step = self._calls, self._step
        for event, clock in zip(self._log, self._clocks, strict=True):
            if event[0] == "backward":
                _, frames, _, root, seq, retain, ref = event
                calls += 1
                stack = tuple([CallSite(code, lasti) for code, lasti in frames[:_STACK]])
                # neither creates a graph nor is traced or nested
                yield BackwardFact(calls, clock, step, stack[0], "backward", (root,), seq, bool(retain), False, False, False, stack, (ref,))
            elif event[0] == "step":
                _, where, seq, optimizer, _, _ = event
                yield StepFact(clock, seq, step, _site(where), optimizer, type(optimizer()).__name__)
                step += 1


def _site(where: Where) -> CallSite | None:
    return None if where[0] is None else CallSite(where[0], where[1])
