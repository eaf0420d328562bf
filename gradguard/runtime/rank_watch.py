"""The watch over the ranks of a distributed job: a thread that wakes once a second, and in training that moves does nothing more.

It answers other ranks that ask where this one is, and asks itself when this rank's collective has been under way for longer than
`ranks.patience`. What it finds is said, never raised: training goes on if it can. Once the collective fails, the rules ask anew
(`gradguard.monitors.rank_exchange.ask_after_error`).
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import FrameType
from typing import Any

import torch.distributed as dist

from gradguard.analysis.incident import Incident
from gradguard.core import ranks
from gradguard.core.callsite import CallSite, user_stack
from gradguard.core.errors import GradGuardError, GradGuardWarning
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import message_of
from gradguard.instrumentation.fault_barrier import say
from gradguard.instrumentation.journal import Journal
from gradguard.monitors import rank_positions
from gradguard.monitors.rank_exchange import Exchange, Here, Stall, job_store
from gradguard.probes import torch_functions
from gradguard.probes.collective_ring import Watched, ring
from gradguard.rules.base import Rule
from gradguard.rules.registry import rules_for
from gradguard.runtime.position_signal import Bell

_EVERY = 1.0  # seconds between two looks
_SHORTEST = 0.05
_QUIET = 2  # looks without a new collective after which others may be waiting for this rank
_ASKED = 3.0  # seconds after a signal in which a rank that waits is seen to
_LATER = 3.0  # times the patience: when a rank that was slow is looked at again
_OTHERS = 4.0  # seconds that another has to say what it finds
_LOGGER = logging.getLogger("gradguard")
_FAMILY = ("GG707", "GG708", "GG709")


class Watch:
    """The thread of one process, and what it has seen at its last look.

    Args:
        guard, session: of the thread that trains.
    """

    def __init__(self, guard: Any, session: Any) -> None:
        self._guard = weakref.ref(guard)
        self._session = weakref.ref(session)
        self._thread = threading.get_ident()
        self._patience = guard.settings.ranks.patience
        self._stop = threading.Event()
        self.ready = threading.Event()  # the exchange is there, or never will be
        self._seen: Any = None  # the collectives begun, at the last look
        self._moved = time.monotonic()  # when they were last seen to have changed
        self._at: Any = None  # the instruction at which the training thread was, at the last look
        self._still = self._moved  # when that was last seen to have changed
        self._asked: tuple[Any, float] | None = None  # what was asked about last, and when to ask again
        self.bell = Bell()
        self._rung: float | None = None  # when the signal was found
        self._own = threading.Thread(target=self._run, name="gradguard-ranks", daemon=True)
        self._own.start()

    def stop(self, seconds: float = 0.0) -> None:
        """Ends the thread; waits for it, where it is in the middle of something."""
        self._stop.set()
        if seconds and self._own.is_alive() and self._own is not threading.current_thread():
            self._own.join(seconds)

    def opened(self, guard: Any) -> None:
        """A guard is entered in the thread that trains."""
        self._guard = weakref.ref(guard)
        self.bell.hang()

    def _run(self) -> None:
        try:
            exchange = Exchange(job_store(), dist.get_rank(), dist.get_world_size())
            Here.exchange = exchange
            ranks.Claims.claim = exchange.claim
            self.ready.set()
            while not self._stop.wait(self._pause()):
                if not dist.is_initialized():
                    return
                self._look(exchange)
        except internal_error() as fault:
            # without its keeper the store is of no use, which is no fault
            if type(fault).__name__ not in ("DistNetworkError", "DistStoreError") and not self._stop.is_set() and dist.is_initialized():
                say("the watch over the ranks", "a hang of several ranks is not explained", fault)
        finally:
            self.ready.set()

    def _pause(self) -> float:
        """Seconds until the next look: a second, or less where the patience ends before."""
        left = self._patience - (time.monotonic() - self._moved)
        return min(_EVERY, left) if left > _SHORTEST else _EVERY

    def _look(self, exchange: Exchange) -> None:
        now = time.monotonic()
        seen = (ring.begun, rank_positions.numbers())
        if seen != self._seen:
            self._seen, self._moved = seen, now
        quiet = now - self._moved
        frame = sys._current_frames().get(self._thread)
        at = None if frame is None else (id(frame.f_code), frame.f_lasti)
        if at != self._at:
            self._at, self._still = at, now
        del frame
        if self.bell.rung() and self._rung is None:
            self._rung = now
        if quiet < _QUIET * _EVERY * 0.9:
            if self._rung is not None and now - self._rung > _ASKED:  # it moves, and the others do not look for questions either
                self._rung = None
                _log("asked by SIGUSR1", [self._here(quiet)])
            return
        while exchange.asked():
            pinned = exchange.pinned
            exchange.answer(pinned[0] if pinned is not None and pinned[1] == ring.begun else self._here(quiet))
            self._asked = (seen, now + max(self._patience, _OTHERS))  # one rank is enough to tell
        if self._rung is not None:
            self._rung = None
            own = self._here(quiet)
            _log("asked by SIGUSR1", self._tell(exchange.gather(own), own))
            return
        if quiet < self._patience or (self._asked is not None and self._asked[0] == seen and now < self._asked[1]):
            return
        own = self._here(quiet)
        guard, session = self._guard(), self._session()
        if own.state != "waits" or guard is None or session is None or guard not in session.guards:
            return
        times = 1.0 if self._asked is None or self._asked[0] != seen else _LATER
        stall = Stall(None, own, exchange.gather(own), error=False)
        if ring.begun != seen[0]:
            return
        _judged(guard, session, stall)
        self._asked = (seen, time.monotonic() + max(times * quiet, self._patience))

    def _tell(self, positions: dict[int, rank_positions.Position], own: rank_positions.Position) -> list[rank_positions.Position]:
        """Judges the ranks' positions as one of those sees it that wait, this one first; the positions."""
        guard, session = self._guard(), self._session()
        waiting = [each for each in (own, *positions.values()) if each.state == "waits"]
        if waiting and guard is not None and session is not None and guard in session.guards:
            _judged(guard, session, Stall(None, waiting[0], positions, error=False))
        return [each for _, each in sorted(positions.items())]

    def interrupted(self, error: BaseException) -> None:
        """The program is interrupted: if nothing has moved for a while, the ranks' positions are judged before that goes on."""
        exchange = Here.exchange
        if exchange is not None and time.monotonic() - self._moved >= _QUIET * _EVERY:
            own = rank_positions.interrupted(error, exchange.step)
            exchange.pinned = (own, ring.begun)
            self._tell(exchange.gather(own, once=True), own)

    def _here(self, quiet: float) -> rank_positions.Position:
        session = self._session()
        still = time.monotonic() - self._still
        return rank_positions.here(self._thread, quiet, still, 0 if session is None else session.steps_so_far())


class _Faults:
    """A rule that fails here costs its diagnosis."""

    lookout: AbstractContextManager[Any] = nullcontext()

    def fault(self, error: BaseException, rules: tuple[Rule, ...] = (), lasting: bool = True) -> None:
        say(" and ".join(f"rule {rule.code}" for rule in rules) or "the watch over the ranks", "a hang is not explained", error)


def _log(why: str, positions: list[rank_positions.Position]) -> None:
    """Writes down where ranks are."""
    _LOGGER.warning("%s: %s", why, "; ".join(map(str, positions)))


def _judged(guard: Any, session: Any, stall: Stall) -> None:
    """Says what keeps this rank waiting, if a rule can tell."""
    run = guard.run_of(session)
    incident = Incident("finding", "ranks", Journal(), tuple, step=stall.own.step, notes=run.notes, finding=stall)
    rules = tuple(rule for rule in rules_for("finding") if rule.code in _FAMILY and run.asks(rule, raised=False))
    try:
        guard.diagnoser.noticed(rules, incident, run, _Faults())
    except GradGuardWarning:  # a filter makes errors of warnings, and nothing is raised here
        pass
    finally:
        incident.dispose()


# -- beginning and end ------------------------------------------------------------------------------------------------

_watch: Watch | None = None
_entered: tuple[Any, Any] | None = None  # weakly: the guard that was entered last, and its session


def entered(guard: Any, session: Any) -> None:
    """A guard is entered; where the process is one of several ranks, the watch begins."""
    global _entered
    if _watch is not None:
        if len(session.guards) == 1:
            _watch.opened(guard)
        return
    _entered = (weakref.ref(guard), weakref.ref(session))
    Watched.begun, Watched.ending, Watched.passing_on = _begin, _ending, torch_functions.look_again
    if dist.is_available() and dist.is_initialized():
        _begin()


def _begin() -> None:
    """Process groups are there, and a guard is or was open."""
    global _watch
    if _watch is not None or _entered is None or dist.get_world_size() < 2:
        return
    guard, session = _entered[0](), _entered[1]()
    if guard is not None and session is not None and session.guards:
        ring.on = True
        torch_functions.look_again()
        # before its first collective, which may end the process; the watching thread has a connection of its own
        Exchange(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()).begin()
        _watch = Watch(guard, session)
        _watch.bell.hang()


def _ending(frame: FrameType) -> None:
    """The program destroys its process groups."""
    _end("finished", user_stack(frame, 4))
    _forget()


def failed(error: BaseException) -> None:
    """An exception leaves the outermost guard."""
    if _watch is None or isinstance(error, GeneratorExit):
        return
    tb, sites = error.__traceback__, list[CallSite]()
    while tb is not None:
        sites.append(CallSite(tb.tb_frame.f_code, tb.tb_lasti))
        tb = tb.tb_next
    diagnosis = error.diagnosis if isinstance(error, GradGuardError) else None
    text = message_of(error) if diagnosis is None else diagnosis.torch_message or ""
    lost = ranks.is_lost_connection(text)
    said = f"{diagnosis.code} {diagnosis.name}: {diagnosis.headline}" if diagnosis is not None else type(error).__name__
    if diagnosis is None and text:
        said += f": {text}"
    state: rank_positions.State = "finished" if isinstance(error, SystemExit) else "failed"
    try:
        _end(state, rank_positions.users(reversed(sites)), said.partition("\n")[0], lost)
    except internal_error() as fault:
        say("the watch over the ranks", "other ranks do not know that this one has failed", fault)


def left() -> None:
    """The outermost guard is left."""
    if _watch is not None:
        _watch.bell.remove()


def interrupted(error: BaseException) -> None:
    """A KeyboardInterrupt leaves the outermost guard."""
    if _watch is not None:
        try:
            _watch.interrupted(error)
        except internal_error() as fault:
            say("the watch over the ranks", "a hang is not explained", fault)


def finished() -> None:
    """The program, or a worker's function, is over."""
    if _watch is not None:
        try:
            if dist.is_initialized():
                _end("finished", ())
        finally:
            _forget(seconds=1.0)


def _end(state: rank_positions.State, sites: Iterable[CallSite], error: str = "", lost: bool = False) -> None:
    if _watch is not None:
        _watch.ready.wait(1.0)  # of a program that is over at once
    exchange = Here.exchange
    if exchange is None or Here.over:
        return
    try:
        if lost and exchange.pinned is not None:  # the collective that it was in is what matters to the others
            exchange.end(replace(exchange.pinned[0], state=state, error=error))
        else:
            exchange.end(rank_positions.ended(state, sites, exchange.step, error, lost))
    except internal_error(RuntimeError):  # the rank that keeps the store has ended
        pass
    Here.over = bool(error)


def _forget(seconds: float = 0.0) -> None:
    """No watch any more."""
    global _watch
    watch, _watch = _watch, None
    if watch is not None:
        watch.bell.remove()
        watch.stop(seconds)
    Here.exchange, Here.over = None, False
    ranks.Claims.claim = _nobody
    ring.on = False
    if ring.file is not None:
        ring.file.remove()
    ring.reset()


def _nobody(key: str) -> None: ...


def _in_child() -> None:
    """A forked process is no rank yet, and has no thread of its parent's."""
    global _watch
    if _watch is not None:
        _watch.bell.remove()
    _watch = None
    Here.exchange, Here.over = None, False
    ranks.Claims.claim = _nobody
    ring.on = False
    ring.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


@atexit.register
def _at_exit() -> None:
    if getattr(sys, "last_type", None) is not None:
        _forget(seconds=1.0)
    else:
        finished()
