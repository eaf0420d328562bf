"""What a guard remembers from step to step: what it has said, which steps it traced, what the rules noted.

Guards made at the same line of the same thread share one `Run`: `with gradguard():` inside a loop is one run, not a
thousand.
"""

from __future__ import annotations

from typing import Any

from gradguard.depth import Depth
from gradguard.diagnosis import Diagnosis
from gradguard.policy import Policy
from gradguard.rules.base import Moment, Rule
from gradguard.rules.registry import rules_for
from gradguard.settings import Settings
from gradguard.speak import Speaker
from gradguard.suppress import Suppressions

_MOST_DIAGNOSES = 1_000


class Run:
    """See the module's docstring.

    Args:
        settings: the guard's.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.policy = Policy(settings)
        self.depth = Depth(settings)
        self.speaker = Speaker()
        self.suppressions = Suppressions()
        self.memory: dict[str, Any] = {}
        self.diagnoses: list[Diagnosis] = []
        self._silent: dict[tuple[Moment, bool], tuple[Rule, ...]] = {}

    def remember(self, diagnosis: Diagnosis) -> None:
        """Keeps a diagnosis for `guard.diagnoses`; the oldest go when there are very many."""
        self.diagnoses.append(diagnosis)
        if len(self.diagnoses) > _MOST_DIAGNOSES:
            del self.diagnoses[0]

    def silent_rules(self, moment: Moment, traced: bool) -> tuple[Rule, ...]:
        """The rules to ask at a moment, those switched off or in need of a trace left out."""
        rules = self._silent.get((moment, traced))
        if rules is None:
            rules = tuple(rule for rule in rules_for(moment)
                          if (traced or not rule.traced_only) and self.policy.asks(rule, raised=False))
            self._silent[moment, traced] = rules
        return rules
