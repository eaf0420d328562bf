"""What the session asks of the guards that are open in its thread; `gradguard.runtime.guard.Guard` is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from gradguard.analysis.incident import Incident
    from gradguard.config.settings import Settings
    from gradguard.core.diagnosis import Diagnosis
    from gradguard.rules.base import Rule
    from gradguard.runtime.run import Run


class OpenGuard(Protocol):
    """A guard.

    Attributes:
        settings: its own.
        models: what it was told of.
        held: diagnoses of a step that may be run again (`gradguard.runtime.rerun.guarded_step`).
        aside: what is noted of a step that is run again.
    """

    settings: Settings
    held: list[tuple[Diagnosis, Exception]] | None
    aside: str | None

    @property
    def models(self) -> Any: ...

    @property
    def run(self) -> Run: ...

    def failed(self, incident: Incident) -> None: ...

    def check(self, rules: tuple[Rule, ...], incident: Incident) -> None: ...

    def verified(self, diagnosis: Diagnosis) -> Diagnosis: ...

    def announce(self) -> None: ...

    def record(self, diagnosis: Diagnosis) -> str: ...
