"""What a guard remembers from step to step: what it has said, which steps it traced, what the rules noted.

Guards made at the same line of the same thread share one `Run`: `with gradguard():` inside a loop is one run, not a
thousand.
"""

from __future__ import annotations

import atexit
import logging
import sys
import weakref
from collections import Counter
from functools import cache
from typing import Any

from gradguard.calm import Calm
from gradguard.depth import Depth
from gradguard.policy import Policy
from gradguard.reporters.layout import clean, one_line
from gradguard.rules.base import Moment, Rule, Screen
from gradguard.rules.protocol.ledger import Ledger
from gradguard.rules.protocol.recorder import Recorder
from gradguard.rules.registry import get_rule, rules_for
from gradguard.settings import Settings
from gradguard.speak import Speaker
from gradguard.suppress import Suppressions

logger = logging.getLogger("gradguard")


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
        policy = self.policy
        self.ledger = Ledger(cache(lambda code: policy.options(get_rule(code))))
        if settings.summary:
            self.ledger.recorder = Recorder()
        self.memory: dict[str, Any] = {"ledger": self.ledger, "options": self.policy.options}
        self._told = 0  # repeats that were summed up already
        self._finished = False
        self._summed = 0  # the entry at whose end a summary was printed
        self.raised: Counter[str] = Counter()  # diagnoses that were raised, by title
        self.skipped = 0  # optimizer steps left out (`gradguard.skipping`)
        self.entries = 0  # how often a guard of this run was entered
        self.files: set[str] = set()  # the user's files met, for ignore comments that silence nothing
        # only weakly: atexit must not keep a run, and with it a rule's memory, for the life of the process
        ref = weakref.ref(self)

        def at_exit() -> None:
            run = ref()
            if run is not None:
                run.end()

        atexit.register(at_exit)
        self._silent: dict[tuple[Moment, bool], tuple[Rule, ...]] = {}
        self._screens: dict[tuple[Moment, bool], tuple[tuple[Screen | None, tuple[Rule, ...]], ...]] = {}
        self._calm: Calm | None = None

    @property
    def calm(self) -> Calm:
        """What the rules in force want to know of calm steps."""
        calm = self._calm
        if calm is None:
            moments: tuple[Moment, ...] = ("before_backward", "after_backward", "before_step")
            calm = self._calm = Calm(tuple(dict.fromkeys(rule for moment in moments for rule in self.silent_rules(moment, False))))
        return calm

    def silent_rules(self, moment: Moment, traced: bool) -> tuple[Rule, ...]:
        """The rules to ask at a moment, those switched off or in need of a trace left out."""
        rules = self._silent.get((moment, traced))
        if rules is None:
            rules = tuple(rule for rule in rules_for(moment) if (traced or not rule.traced_only) and self.policy.asks(rule, raised=False))
            self._silent[moment, traced] = rules
        return rules

    def screens(self, moment: Moment, traced: bool) -> tuple[tuple[Screen | None, tuple[Rule, ...]], ...]:
        """The rules to ask at a moment, by the cheap look that comes before them: what several share is asked once."""
        screens = self._screens.get((moment, traced))
        if screens is None:
            shared: dict[Screen | None, list[Rule]] = {}
            for rule in self.silent_rules(moment, traced):
                shared.setdefault(rule.screen, []).append(rule)
            screens = self._screens[moment, traced] = tuple((screen, tuple(rules)) for screen, rules in shared.items())
        return screens

    def tell_repeats(self) -> None:
        """One log line a cause that was met again since the last time."""
        repeats = sum(diagnosis.repeats for diagnosis in self.speaker.said())
        if repeats > self._told:
            self._told = repeats
            for line in self.speaker.summary_lines():
                logger.warning("%s", line)

    def end(self) -> None:
        """The process ends: a run that was guarded step by step has had no other end."""
        from gradguard.guard import Guard

        if self._finished or not self.depth.steps:
            return
        if getattr(sys, "last_type", None) is not None:
            # The program dies of an exception: that run has no end to judge. What is imported here could also undo Python's
            # note that it was interrupted, and with it the exit status of a SIGINT.
            return
        try:
            Guard.of_run(self).close()
        except Exception as error:  # at the end of the process there is nobody left to raise to
            logger.error("%s", error)

    def interrupted(self) -> None:
        """Ctrl-C: what is known of the run so far is told; what only a whole run would show is not judged."""
        if not self._finished:
            self.tell_repeats()
            self._tell_summary()

    def broken_off(self) -> None:
        """An exception ends the run, and the program may live on: it has no end to judge when the process ends."""
        self.interrupted()
        self._finished = True

    def _tell_summary(self) -> None:
        if self.settings.summary and self._summed != self.entries:
            self._summed = self.entries
            from gradguard.summary import summary_of

            print(clean(summary_of(self).text()), file=sys.stderr)

    def finish(self) -> None:
        """The end of the run: repeats, and (where the settings ask for it) comments that silenced nothing."""
        if self._finished:
            return
        self._finished = True
        self.tell_repeats()
        self._tell_summary()
        if self.settings.actions.unused_ignores == "off":
            return
        for problem in self.suppressions.problems(self.files):
            logger.warning("%s", one_line(f"{problem.file}:{problem.line}: {problem.message}"))
        for file, line, text in self.suppressions.unused(self.files):
            logger.warning("%s", one_line(f"{file}:{line}: `{text}` silences nothing"))
