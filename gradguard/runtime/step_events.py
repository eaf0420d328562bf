"""Between the session and the ledger of the step protocol: hands happenings on, lets rules judge what the ledger finds odd."""

from __future__ import annotations

from collections.abc import Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any

from gradguard.analysis.live.frames import live_frames
from gradguard.core.callsite import CallSite, user_frame
from gradguard.monitors import idle_ledger, unaveraged_gradients
from gradguard.monitors.findings import Finding
from gradguard.probes import replicas
from gradguard.probes.step_protocol import take_census, watch_registrations
from gradguard.torch_compat.private_api import dynamo_in_use, quiet, sequence_number

if TYPE_CHECKING:
    from gradguard.instrumentation.facts import BackwardFact
    from gradguard.monitors.gradient_ledger import Ledger
    from gradguard.runtime.incident_routing import Incidents


def site_of(frame: FrameType | None) -> CallSite | None:
    """The user's line from a frame outwards."""
    caller = user_frame(frame)
    return None if caller is None else CallSite(caller.f_code, caller.f_lasti)


def tell(session: Incidents, happening: str, frame: FrameType | None, *facts: Any) -> None:
    """Tells the ledger what happened (a method's name of `Ledger` and its arguments). The caller holds up the session's shield.

    Raises:
        GradGuardError, GradGuardWarning: a rule has found something and the policy raises.
    """
    ledger = session.run.ledger
    with quiet():  # by a mode, or by a `__torch_function__` of a tensor's class
        getattr(ledger, happening)(*facts)
    if ledger.census_until:
        _census(session, ledger)
    if ledger.survey.watches_making != (session.registrations is not None):
        _registrations(session, ledger)
    if replicas.known or session.forwards is not None:
        _forwards(session)
    if ledger.found:
        found, ledger.found = ledger.found, []
        for finding in found:
            with session.lookout:
                judge(session, finding, frame)


def before_backward(session: Incidents, frame: FrameType) -> None:
    """The user's code calls backward()."""
    ledger = session.run.ledger
    if not ledger.asleep or ledger.ended:
        tell(session, "before_backward", frame)


def after_backward(session: Incidents, frame: FrameType, call: BackwardFact, roots: tuple[Any, ...]) -> None:
    """backward() has returned."""
    ledger = session.run.ledger
    if not ledger.asleep or ledger.backward_asleep():
        tell(session, "after_backward", frame, call, roots)
    if not ledger.steps:
        session.between_backwards()


def differentiated(session: Incidents, call: BackwardFact, roots: tuple[Any, ...]) -> None:
    """A backward call or an autograd.grad of a traced step has returned."""
    with quiet():
        session.run.ledger.differentiated(call, roots, sequence_number())


def after_step(session: Incidents, frame: FrameType, optimizer: Any, site: CallSite | None) -> None:
    """An optimizer has stepped."""
    ledger = session.run.ledger
    if not ledger.asleep:
        tell(session, "after_step", frame, optimizer, site)
    else:
        with quiet():
            asked = idle_ledger.step(ledger, optimizer, site)
        if session.forwards is not None:
            _forwards(session)
        if asked:
            tell(session, "nothing", frame)


def _census(session: Incidents, ledger: Ledger) -> None:
    """Puts the hook that sees module calls in place, and takes it away some steps later."""
    if session.census is None and ledger.steps < ledger.census_until and not dynamo_in_use():
        shield = session.shield

        def called(module: Any, caller: FrameType) -> None:
            with shield:
                ledger.census(module, caller)

        session.census = take_census(called)
        session.run.depth.incident()  # where paths are cut shows in a traced step only
        if session.census is None:
            ledger.census_until = 0
    elif ledger.steps >= ledger.census_until:
        end_census(session, ledger)


def _registrations(session: Incidents, ledger: Ledger) -> None:
    """Puts the hook that sees modules get parameters in place, or takes it away."""
    if session.registrations is not None:
        session.registrations.remove()
        session.registrations = None
    elif not dynamo_in_use():
        session.registrations = watch_registrations(ledger.survey.registered)


def _forwards(session: Incidents) -> None:
    """Puts the hook that sees forwards past DistributedDataParallel in place, or takes it away."""
    wanted = unaveraged_gradients.watching()
    if session.forwards is not None and not wanted:
        session.forwards.remove()
        session.forwards = None
    elif session.forwards is None and wanted and not dynamo_in_use():
        shield = session.shield

        def called(module: Any, caller: FrameType) -> None:
            with shield:
                unaveraged_gradients.forward(module, caller)

        session.forwards = take_census(called)


def pause_census(session: Incidents) -> None:
    """The guard is left, or is about to be: hooks see nothing until it is entered again."""
    for handle in (session.census, session.registrations, session.forwards):
        if handle is not None:
            handle.remove()
    session.census = session.registrations = session.forwards = None


def resume_census(session: Incidents) -> None:
    """The guard is entered again: a census that was under way goes on."""
    ledger = session.run.ledger
    if ledger.census_until:
        _census(session, ledger)
    if ledger.survey.watches_making:
        _registrations(session, ledger)
    if replicas.known:
        _forwards(session)


def end_census(session: Incidents, ledger: Ledger) -> None:
    """No longer looks at module calls."""
    if ledger.census_until:
        ledger.severed.disarm()
    ledger.census_until = 0
    if session.census is not None:
        session.census.remove()
        session.census = None


def judge_all(session: Incidents, findings: Iterable[Finding], frame: FrameType | None) -> None:
    """`judge` for each; what fails on the way costs that one."""
    for finding in findings:
        judge(session, finding, frame)


def judge(session: Incidents, finding: Finding, frame: FrameType | None) -> None:
    """Asks the one rule that a finding is for."""
    run = session.run
    if not finding.ROUTINE:  # a look that every healthy program gets
        run.depth.incident()  # the next steps are traced
    rules = tuple(rule for rule in run.silent_rules("finding", True) if rule.code == finding.code)
    if rules:
        optimizer = None if finding.book is None else finding.book.ref()
        incident = session.incident("finding", "protocol", lambda: live_frames(frame), finding=finding, optimizer=optimizer)
        with session.disposing(incident), quiet():
            session.guard.check(rules, incident)
