"""Causes that were told already: met again on the same evidence, they are counted, and no rule is asked what they are.

Finding out what a cause is (whose tensor, which line, what to write instead) goes through the objects of the process and through
source. The evidence is cheap beside it: where the program stands, what the finding is about, what graph there is, and which lines
have done what since the last turn of the loop. Equal evidence need not mean an equal cause, since rules look at values too: the rule
is asked in full again at the second, fourth, eighth ... meeting, and what it no longer finds is unlearnt.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from gradguard.analysis.graph.walk import walk
from gradguard.core.callsite import CallSite

if TYPE_CHECKING:
    from gradguard.analysis.incident import Incident
    from gradguard.core.diagnosis import Diagnosis
    from gradguard.rules.base import Rule

_MOST = 256  # pieces of evidence that are kept
_STACK = 12  # frames of the user's around an incident
_NODES = 20_000
_PLAIN = (str, int, float, bool, type(None), CallSite)


class Repeats:
    """The causes that a run has told, by the evidence they were found on."""

    PART = "memory of what was found"

    def __init__(self) -> None:
        self._known: dict[tuple[str, Hashable], tuple[Diagnosis, int]] = {}
        self._codes: set[str] = set()

    def again(self, rule: Rule, incident: Incident) -> Diagnosis | None:
        """The diagnosis that this evidence stands for; None where the rule has to be asked."""
        if rule.code not in self._codes or (key := self._key(rule, incident)) is None or key not in self._known:
            return None
        diagnosis, met = self._known[key]
        self._known[key] = diagnosis, met + 1
        return diagnosis if met & (met + 1) else None  # `met + 1` with this meeting: powers of two are looked into

    def learn(self, rule: Rule, incident: Incident, diagnosis: Diagnosis) -> None:
        """A diagnosis was told, or counted as known."""
        if incident.moment == "before_step" or (key := self._key(rule, incident)) is None:  # there rules also act
            return
        self._codes.add(rule.code)
        met = self._known.pop(key, (diagnosis, 1))[1]
        if len(self._known) >= _MOST:
            self._known.pop(next(iter(self._known)))
        self._known[key] = diagnosis, met

    def unlearn(self, rule: Rule, incident: Incident) -> None:
        """The rule was asked, and has found nothing."""
        if rule.code in self._codes and (key := self._key(rule, incident)) is not None:
            self._known.pop(key, None)

    @staticmethod
    def _key(rule: Rule, incident: Incident) -> tuple[str, Hashable] | None:
        if "_evidence" not in vars(incident):
            vars(incident)["_evidence"] = evidence(incident)
        found: Hashable | None = vars(incident)["_evidence"]
        return None if found is None else (rule.code, found)


def evidence(incident: Incident) -> Hashable | None:
    """What tells one cause from another, as far as that is cheap to know; None where it is not known."""
    subject: Hashable = None
    if incident.finding is not None:
        try:
            facts = ((name, value) for name, value in vars(incident.finding).items() if name != "book")
            subject = type(incident.finding).__name__, frozenset((name, _plain(value)) for name, value in facts)
        except TypeError:
            return None
    # code objects of two files can be equal
    stack = tuple((view.site, view.site.code.co_filename) for view in incident.user_frames[:_STACK])
    optimizer = None if incident.optimizer is None else id(incident.optimizer)
    nodes = frozenset(type(node).__name__ for node, _ in walk(incident.root_nodes, _NODES))
    return incident.moment, incident.where, incident.traced, stack, subject, optimizer, nodes, _lines(incident)


def _lines(incident: Incident) -> frozenset[Hashable]:
    """Which lines have done what since the program last came to this call."""
    journal, call = incident.journal, incident.call
    site = call.site if call is not None else incident.site
    since = next((fact.clock for fact in reversed(journal.backwards) if fact is not call and fact.site == site and not fact.nested), 0)
    found: set[Hashable] = {(id(op[2]), op[3]) for op in takewhile(lambda op: op[5] > since, reversed(journal.ops))}
    for facts in (journal.writes, journal.escapes, journal.modes):
        recent: Any = takewhile(lambda fact: fact.clock > since, reversed(facts))
        found.update((type(fact).__name__, fact.site) for fact in recent)
    return frozenset(found)


def _plain(value: Any) -> Hashable:
    """A value of a finding, as something to compare.

    Raises:
        TypeError: what it is cannot be told without asking it.
    """
    if type(value) in _PLAIN:
        plain: Hashable = value
        return plain
    if type(value) in (tuple, list):
        return tuple(map(_plain, value))
    if isinstance(value, weakref.ref):
        return id(value())
    if type(value).__module__.startswith("gradguard."):  # a book of an optimizer, kept as long as the optimizer is
        return id(value)
    raise TypeError(type(value).__name__)
