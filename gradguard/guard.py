"""The guard: opens and closes a session's probes, routes incidents through the rules to the policy."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from gradguard.depth import Depth
from gradguard.diagnosis import Diagnosis
from gradguard.errors import GradGuardError, error_type
from gradguard.evidence.frames import traceback_frames
from gradguard.probes import patches
from gradguard.reporters.jsonl import JsonlReport
from gradguard.reporters.terminal import render_for_error
from gradguard.rules.base import Moment, Rule
from gradguard.rules.incident import Incident
from gradguard.rules.registry import rules_for
from gradguard.session import Session, current_session

P = ParamSpec("P")
R = TypeVar("R")


class Guard:
    """One guarding session: a context manager, a decorator, reusable and re-entrant.

    Args:
        objects: models and optimizers, in any order; optional, they only make names better.
        level: "off", "watch", "standard", "strict" or "forensic".
        config: a YAML file with settings.
        report: a file that gets one JSON object a diagnosis.
        settings: further settings by name.

    Raises:
        ConfigError: a setting, file or level that does not exist or fit; the message says where and what would be right.

    Example:
        >>> with gradguard():
        ...     loss = model(x).pow(2).mean()
        ...     loss.backward()
    """

    def __init__(self, *objects: Any, level: str | None = None, config: Any = None, report: Any = None, **settings: Any) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.watch(*objects)
        self.level = level or "standard"
        self.depth = Depth(self.level)
        self.report = JsonlReport(report) if report is not None else None
        self.diagnoses: list[Diagnosis] = []
        self._open: list[Session] = []
        self._said: dict[tuple[str, str, int], Diagnosis] = {}

    def watch(self, *objects: Any) -> Guard:
        """Names models and optimizers (and schedulers, scalers); returns the guard.

        Raises:
            TypeError: an object that is none of these.
        """
        for item in objects:
            if item is None:
                continue
            if isinstance(item, nn.Module):
                self.models.append(item)
            elif isinstance(item, torch.optim.Optimizer):
                self.optimizers.append(item)
            elif isinstance(item, (list, tuple)):
                self.watch(*item)
            elif not (hasattr(item, "step") or hasattr(item, "unscale_")):
                raise TypeError(f"gradguard() takes models and optimizers, not {type(item).__name__}")
        return self

    # -- entering and leaving -----------------------------------------------------------------------------------------

    def __enter__(self) -> Guard:
        if self.level == "off":
            return self
        session = current_session()
        patches.install()
        self._open.append(session)
        session.open(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if not self._open:
            return
        session = self._open.pop()
        try:
            if error is not None and isinstance(error, Exception) and not isinstance(error, GradGuardError):
                self._escaped(session, error, tb)
            if error is None:
                session.moment("close", "close", _caller())
        finally:
            session.close(self)
            patches.remove()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorates a step function: each call runs under the guard."""

        @wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return guarded

    # -- incidents ----------------------------------------------------------------------------------------------------

    def failed(self, incident: Incident) -> None:
        """Raises the diagnosis of an exception, if a rule understands it; returns otherwise."""
        __tracebackhide__ = True
        assert incident.error is not None
        diagnosis = self.diagnose(rules_for("error"), incident)
        if diagnosis is None:
            return
        text = self._say(diagnosis)
        error = incident.error
        raise error_type(type(error))(text, diagnosis) from error

    def check(self, rules: tuple[Rule, ...], incident: Incident) -> None:
        """Asks rules for silent bugs; says what they find."""
        for rule in rules:
            diagnosis = self.diagnose((rule,), incident)
            if diagnosis is not None:
                self._speak(diagnosis)

    def diagnose(self, rules: tuple[Rule, ...], incident: Incident) -> Diagnosis | None:
        """The first diagnosis that a rule can carry. A rule that fails is a fault of gradguard's, not of the training."""
        text = incident.message.lower()
        for rule in rules:
            if rule.messages and incident.error is not None and not any(piece in text for piece in rule.messages):
                continue
            try:
                found = rule.recognise(incident)
            except Exception as fault:
                current_session().fault(fault)
                continue
            if found is not None:
                updates: dict[str, Any] = {"step": incident.step}
                if incident.error is not None and found.torch_message is None:
                    updates["torch_message"] = incident.message
                return found.model_copy(update=updates)
        return None

    def silent_rules(self, moment: Moment, traced: bool) -> tuple[Rule, ...]:
        """The rules asked at a moment of a step; empty for most moments, which then cost next to nothing."""
        rules = rules_for(moment)
        return rules if traced or not rules else tuple(rule for rule in rules if not rule.traced_only)

    def _escaped(self, session: Session, error: Exception, tb: TracebackType | None) -> None:
        incident = session.incident("error", "escape", traceback_frames(tb), error=error)
        with session.untraced():
            self.failed(incident)

    def _say(self, diagnosis: Diagnosis) -> str:
        text = render_for_error(diagnosis)
        self.diagnoses.append(diagnosis)
        if self.report is not None:
            self.report.write(diagnosis, text)
        return text

    def _speak(self, diagnosis: Diagnosis) -> None:
        import warnings

        from gradguard.errors import GradGuardWarning

        known = self._said.get(diagnosis.key)
        if known is not None:
            known.repeats += 1
            return
        self._said[diagnosis.key] = diagnosis
        text = self._say(diagnosis)
        place = diagnosis.culprit
        warnings.warn_explicit(GradGuardWarning(text, diagnosis), GradGuardWarning, place.file if place else "<unknown>", place.line if place else 0)


def _caller() -> Any:
    import sys

    return sys._getframe(2)


gradguard = Guard
