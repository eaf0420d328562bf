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
from functools import cache, cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from gradguard.config.policy import Policy
from gradguard.config.settings import Settings, wanted_color
from gradguard.config.suppressions import Suppressions
from gradguard.core.callsite import CallSite
from gradguard.core.errors import GradGuardError, GradGuardWarning
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.moments import Moment
from gradguard.core.notes import Notes
from gradguard.instrumentation.fault_barrier import mute, say, unmute
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.reporting.terminal.layout import clean, one_line
from gradguard.reporting.terminal.render import encodable, terminal_width, wants_color
from gradguard.reporting.user_warnings import Speaker
from gradguard.rules.base import Rule, Screen
from gradguard.rules.registry import get_rule, rules_for
from gradguard.runtime.calm_steps import Calm
from gradguard.runtime.repeated_findings import Repeats
from gradguard.runtime.trace_schedule import Depth

_OPS_READ = 4096  # of the journal, for the lines that have run
if TYPE_CHECKING:
    from collections.abc import Callable

    from gradguard.instrumentation.journal import Journal
    from gradguard.runtime.memory_watch import MemoryWatch
    from gradguard.runtime.metric_writing import MetricWriting
    from gradguard.runtime.summary import RunSummary

logger = logging.getLogger("gradguard")


class Run:
    """See the module's docstring.

    Args:
        settings: the guard's.
        close: closes a guard of this run, where the process ends and none has been.
    """

    def __init__(self, settings: Settings, close: Callable[[Run], None]) -> None:
        self.settings = settings
        self._close = close
        self.policy = Policy(settings)
        self.depth = Depth(settings)
        self.speaker = Speaker(wanted_color(settings), settings.verbosity)
        self.suppressions = Suppressions()
        self.repeats = Repeats()
        policy = self.policy
        self.ledger = Ledger(cache(lambda code: policy.options(get_rule(code))), settings.summary or settings.html is not None)
        self.notes = Notes(self.policy.options)
        self.notes.put(self.ledger)
        self._told = 0  # repeats that were summed up already
        self._finished = False
        self._memory_told = False
        self._summed = 0  # the entry at whose end a summary was printed
        self.raised: Counter[str] = Counter()  # diagnoses that were raised, by title
        self.metrics: MetricWriting | None = None  # where a writer is given
        self.blind = False  # after a fault of gradguard's own: nothing is traced
        self.muted: list[Any] = []  # parts that failed and do nothing in this run
        self._left_out: set[Rule] = set()  # rules that have failed
        self.skipped = 0  # optimizer steps left out (`gradguard.runtime.step_skipping`)
        self.entries = 0  # how often a guard of this run was entered
        self.lines: dict[str, set[int]] = {}  # of the user's files, those known to have run, for ignore comments that silence nothing
        # only weakly: atexit must not keep a run, and with it a rule's memory, for the life of the process
        ref = weakref.ref(self)

        def at_exit() -> None:
            run = ref()
            if run is not None:
                run.end()
                run.tell_hidden()

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

    def left(self) -> None:
        """Another run begins in this thread: the parts that both use start anew."""
        while self.muted:
            unmute(self.muted.pop())

    def silent_rules(self, moment: Moment, traced: bool) -> tuple[Rule, ...]:
        """The rules to ask at a moment, those switched off or in need of a trace left out."""
        rules = self._silent.get((moment, traced))
        if rules is None:
            rules = tuple(rule for rule in rules_for(moment) if (traced or not rule.traced_only) and self.asks(rule, raised=False))
            self._silent[moment, traced] = rules
        return rules

    def asks(self, rule: Rule, raised: bool) -> bool:
        """Whether a rule has a say in this run."""
        return rule not in self._left_out and self.policy.asks(rule, raised=raised)

    def leave_out(self, rules: tuple[Rule, ...]) -> None:
        """These rules have failed: they are not asked again."""
        self._left_out.update(rules)
        self._silent.clear()
        self._screens.clear()
        self._calm = None

    def take_out(self, part: Any) -> None:
        """A part has failed, and what it knows is incomplete from here on."""
        if getattr(part, "failed", False):  # it does nothing any more
            return
        if part is self.ledger:
            self.ledger = part.unwritten()
            self.notes.put(self.ledger)
        mute(part)
        self.muted.append(part)

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
        """One log line a cause that was met again since the last time; and one line, whatever is filtered, of what was not shown."""
        self.tell_hidden()
        repeats = sum(diagnosis.repeats for diagnosis in self.speaker.said())
        if repeats > self._told:
            self._told = repeats
            if self.settings.verbosity == "quiet" and not logger.hasHandlers():  # logging's last resort prints them
                return
            for line in self.speaker.summary_lines():
                logger.warning("%s", line)

    def tell_hidden(self) -> None:
        """`warnings.filterwarnings("ignore")` is meant for noise: that there was a finding is said all the same."""
        line = self.speaker.hidden_line()
        if line is not None and sys.stderr is not None:
            print(line, file=sys.stderr)

    def end(self) -> None:
        """The process ends: a run that was guarded step by step has had no other end."""
        if self._finished or not self.depth.steps:
            return
        if getattr(sys, "last_type", None) is not None:
            # The program dies of an exception: that run has no end to judge. What is imported here could also undo Python's
            # note that it was interrupted, and with it the exit status of a SIGINT.
            return
        try:
            self._close(self)
        except (GradGuardError, GradGuardWarning) as error:  # at the end of the process there is nobody left to raise to
            logger.error("%s", error)
        except internal_error() as fault:
            say("the end of the run", "what is told there is lost", fault)

    def note_lines(self, journal: Journal) -> None:
        """Remembers which lines have run, as far as the journal knows them."""
        sites = {CallSite(op[2], op[3]) for op in islice(reversed(journal.ops), _OPS_READ)}  # code objects of Dynamo's have no hash
        for call in journal.backwards:
            sites.update(call.stack)
        sites.update(step.site for step in journal.steps if step.site is not None)
        for site in sites:
            self.lines.setdefault(site.code.co_filename, set()).add(site.line)

    def interrupted(self) -> None:
        """Ctrl-C: what is known of the run so far is told; what only a whole run would show is not judged."""
        if not self._finished:
            self.tell_metrics()
            self.tell_repeats()
            self._tell_summary()
            self.tell_memory()

    def broken_off(self) -> None:
        """An exception ends the run, and the program may live on: it has no end to judge when the process ends."""
        self.interrupted()
        self._finished = True

    def tell_metrics(self) -> None:
        """The run ends, or is broken off: the writer, where there is one, gets what was found since it was told last."""
        if self.metrics is not None:
            self.metrics.tell_rest(self)

    def summary(self) -> RunSummary:
        """The run so far. Norms and names are there when `summary: true` was set from the start."""
        from gradguard.runtime.summary import summary_of

        found = dict(self.raised)
        found |= {diagnosis.title(): diagnosis.repeats + 1 for diagnosis in self.speaker.said()}
        ignored = {f"{comment.file}:{comment.line} {comment.text}": comment.used for comment in self.suppressions.used()}
        return summary_of(self.ledger, self.skipped, found, ignored)

    def _tell_summary(self) -> None:
        if self.settings.summary and self._summed != self.entries:
            self._summed = self.entries
            print(clean(self.summary().text()), file=sys.stderr)

    @cached_property
    def watch(self) -> MemoryWatch:
        """What is remembered of memory, where it is accounted for."""
        from gradguard.runtime.memory_watch import MemoryWatch  # late: few runs do

        return MemoryWatch()

    def tell_memory(self) -> None:
        """Prints the account of memory, once, where the settings ask for one."""
        if self.settings.memory and not self._memory_told:
            report = self.watch.report()
            if report is not None and sys.stderr is not None:
                from gradguard.reporting.terminal.memory_table import render_memory

                self._memory_told = True
                color = wanted_color(self.settings)
                color = wants_color(sys.stderr) if color is None else color
                print(encodable(render_memory(report, color, terminal_width()), sys.stderr), file=sys.stderr)

    def finish(self) -> None:
        """The end of the run: repeats, and (where the settings ask for it) comments that silenced nothing."""
        if self._finished:
            return
        self._finished = True
        self.tell_metrics()
        self.metrics = None
        self.tell_repeats()
        self._tell_summary()
        self.tell_memory()
        if self.settings.actions.unused_ignores == "off":
            return
        for problem in self.suppressions.problems(self.lines):
            logger.warning("%s", one_line(f"{problem.file}:{problem.line}: {problem.message}"))
        for file, line, text in self.suppressions.unused(self.lines):
            logger.warning("%s", one_line(f"{file}:{line}: `{text}` silences nothing"))
