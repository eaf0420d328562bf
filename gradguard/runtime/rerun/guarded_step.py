"""A training step that is run again, traced, where it failed untraced: `Guard.step`, and the adapters that use it.

What a second run may do, and what is put back after it, is in `rerun.replay`; here is when there is one and what is
raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gradguard.core.diagnosis import Diagnosis
from gradguard.core.errors import GradGuardError, error_type
from gradguard.core.foreign_exceptions import internal_error, is_internal
from gradguard.core.safe_read import message_of
from gradguard.instrumentation.fault_barrier import say
from gradguard.runtime.diagnoser import Diagnoser
from gradguard.runtime.rerun.random_state import RandomState
from gradguard.runtime.rerun.reachable_state import Reach, UnrestorableError, silence
from gradguard.runtime.rerun.replay import can_run_again, nothing_stays
from gradguard.runtime.session import Session, current_session

R = TypeVar("R")


def run_step(diagnoser: Diagnoser, run: Callable[[], R]) -> R:
    """Runs a step under a guard that is open.

    Raises:
        GradGuardError: the diagnosis, from the traced run where there was one.
    """
    before: RandomState | None = None
    try:
        session = current_session()
        if not session.tracing:
            before = RandomState(fresh=False)
    except internal_error() as fault:
        say("the guard", "a step that fails is not run again", fault)
    if before is None:
        return run()
    diagnoser.held = []
    try:
        return run()
    except internal_error() as error:  # the step's own
        first = error
        held = diagnoser.held
    finally:
        diagnoser.held = None
    _again(diagnoser, session, first, held, before, run)
    raise first


def _again(
    diagnoser: Diagnoser,
    session: Session,
    first: Exception,
    held: list[tuple[Diagnosis, Exception]],
    before: RandomState,
    run: Callable[[], object],
) -> None:
    """The second run of a failed step; raises what is known after it."""
    if isinstance(first, GradGuardError):
        return
    if not can_run_again(first):
        _raise_held(diagnoser, session, first, held, None)
        return
    try:
        reach = Reach(run)
    except UnrestorableError as reason:
        _raise_held(diagnoser, session, first, held, f"the step failed untraced; it was not run again to find more: {reason}")
        return
    except internal_error() as fault:
        session.fault(fault)
        _raise_held(diagnoser, session, first, held, None)
        return
    after = RandomState()
    before.restore()
    session.trace(True)
    diagnoser.aside = "the step failed untraced and was run again, traced, to find the place; nothing of that run stayed"
    try:
        with silence(), nothing_stays():
            run()
    except GradGuardError as found:
        raise found from first
    except internal_error() as other:
        note = f"run again, traced, the step failed otherwise ({type(other).__name__})" if message_of(other) != message_of(first) else None
    else:
        note = "run again from the same random state, traced, the step did not fail: it depends on something that the first run changed"
    finally:
        diagnoser.aside = None
        wrong = reach.put_back()
        after.restore()
        for problem in wrong:
            if not is_internal(problem):
                raise problem
            session.fault(problem)
    _raise_held(diagnoser, session, first, held, note)


def _raise_held(
    diagnoser: Diagnoser, session: Session, first: Exception, held: list[tuple[Diagnosis, Exception]], note: str | None
) -> None:
    """Raises the diagnosis that the untraced run had of its own failure, if it had one."""
    for diagnosis, error in held:
        if error is first:
            told = diagnoser.verified(diagnosis.model_copy(update={"notes": [*diagnosis.notes, *([note] if note else [])]}))
            text = diagnoser.record(told, session)
            diagnoser.announce()
            raise error_type(type(first))(text, told) from first
