"""What a rule is, and what it is given.

A rule is one file in a family's folder, `ggNNN_name.py`; where it tells several causes apart, a folder `ggNNN_name/` with
`rule.py` and a file a cause. It has a module docstring with fixed sections (What it is / Why it is wrong / Example /
Use instead / Fix safety / When it speaks, what silences it), one `RULE` and the function that recognises the cause in an
incident. Nothing else needs touching to add one: `gradguard.rules.registry` finds it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gradguard.core.moments import Moment
from gradguard.core.notes import Notes
from gradguard.instrumentation.event_buffer import Ahead

if TYPE_CHECKING:
    from gradguard.analysis.incident import Incident
    from gradguard.core.diagnosis import Diagnosis, Severity

Screen = Callable[[Notes, Moment, dict[str, Any], bool], bool]


@dataclass(frozen=True)
class SkipStep:
    """Noted by a rule at "before_step": this step is to be left out."""


@dataclass(frozen=True)
class Rule:
    """One cause of trouble.

    Attributes:
        code: stable, such as GG101; codes never change meaning once released.
        name: the kebab-case slug that configs, suppressions and reports use.
        summary: one line, for `gradguard rules`.
        recognise: reads an incident and returns the diagnosis, or None where the evidence does not carry it.
        moments: when the rule is asked. Rules for exceptions are asked at "error" only.
        priority: among rules of one incident the higher is asked first; the first diagnosis wins.
        messages: lower-case pieces of PyTorch's error text, any of which must be present ("error" rules only; empty: always
            asked). Both wordings stand here where releases differ.
        severity: of the diagnosis, unless the rule says otherwise.
        traced_only: for silent checks: needs the evidence of a traced step.
        screen: for silent checks that are asked at every step: a cheap look that comes before anything else. Gets the run's
            notes, the moment, its facts (`roots`, `call`, `optimizer` ...) and whether the step is traced; only where it says
            True is an incident made and the rule asked. No op probe is on. Rules that name the same function share one look.
        idle, ahead: for silent checks of untraced steps (`gradguard.runtime.fast_path`): whether the rule has no business in the step that
            begins; and of which backward calls it needs only the loss. A rule with neither has every step looked at the long way.
    """

    code: str
    name: str
    summary: str
    recognise: Callable[[Incident], Diagnosis | None] = field(repr=False)
    moments: frozenset[Moment] = frozenset({"error"})
    priority: int = 0
    messages: tuple[str, ...] = ()
    severity: Severity = "error"
    traced_only: bool = False
    screen: Screen | None = field(default=None, repr=False)
    idle: Callable[[Notes], bool] | None = field(default=None, repr=False)
    ahead: Ahead | None = field(default=None, repr=False)

    @property
    def family(self) -> str:
        """The family prefix, such as GG1."""
        return self.code[:3]

    @property
    def docs(self) -> str:
        """The rule's page: the docstring of its file."""
        module = sys.modules[self.recognise.__module__]
        return inspect.cleandoc(module.__doc__ or "")
