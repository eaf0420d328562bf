"""What gradguard raises and warns.

`GradGuardError` is the user's training error, explained. `ConfigError` and its kin are misuse of gradguard itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradguard.core.diagnosis import Diagnosis


_PUBLIC = "gradguard"  # the package that users import these from: what a traceback names


class GradGuardError(RuntimeError):
    """A failed training step, diagnosed.

    It is a `RuntimeError`, so code that catches what PyTorch raises goes on working; where PyTorch raised another type
    (an `AttributeError` on a missing `.grad`, say), the error raised is an instance of that type too. `str()` is the
    rendered diagnosis with PyTorch's own words at the end, `.diagnosis` the data, `__cause__` the original exception.
    """

    __module__ = _PUBLIC
    diagnosis: Diagnosis

    def __init__(self, message: str, diagnosis: Diagnosis) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback through torch: the user's frames, then the diagnosis."""
        # by name: what draws stands above this floor, and a run that never fails does not load it
        rendered: list[str] = import_module("gradguard.reporting.tracebacks").for_cell(self)
        return rendered

    def __reduce__(self) -> tuple[object, ...]:
        # The mixed types below exist only in this process; a worker's error is unpickled as a plain GradGuardError.
        return (GradGuardError, (str(self), self.diagnosis))


def mark_seen(error: BaseException) -> None:
    """What is not replaced by its diagnosis must not be diagnosed again on its way out."""
    try:
        error.__gradguard_seen__ = True  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        pass


class GradGuardWarning(UserWarning):
    """A bug that does not raise, or a diagnosis that the policy turned into a warning."""

    __module__ = _PUBLIC
    diagnosis: Diagnosis | None = None

    def __init__(self, message: str, diagnosis: Diagnosis | None = None) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis


class ConfigError(ValueError):
    """A setting, file or command line that gradguard cannot use; the message says where and what would be right."""

    __module__ = _PUBLIC


class UnknownRuleError(ConfigError):
    """A rule code, name or family that does not exist."""


def error_type(original: type[BaseException]) -> type[GradGuardError]:
    """The type to raise in place of `original`: always a `GradGuardError`, and an `original` too where the layouts allow it."""
    if issubclass(GradGuardError, original):
        return GradGuardError
    for known in type.__subclasses__(original):  # which a program may have made in a function, with all that it captures: no cache
        if issubclass(known, GradGuardError) and known.__bases__ == (GradGuardError, original):
            return known
    try:
        own = {"__module__": _PUBLIC, "__str__": BaseException.__str__}  # the original's own (numpy's, KeyError's) would say something else
        return type(f"GradGuard{original.__name__}", (GradGuardError, original), own)
    except TypeError:
        return GradGuardError
