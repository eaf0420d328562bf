"""What a diagnosis tells of the steps before it: their backward calls and optimizer steps."""

from __future__ import annotations

from itertools import islice

from gradguard.core.callsite import CallSite
from gradguard.instrumentation.facts import BackwardFact
from gradguard.instrumentation.journal import Journal
from gradguard.reporting.source_blocks import shown_path

_STEPS = 3  # before the one under way
_MOST = 12


def recent_events(journal: Journal) -> list[str]:
    """The last backward calls and optimizer steps of this thread, oldest first, in words."""
    facts = [*islice(reversed(journal.backwards), _MOST), *islice(reversed(journal.steps), _MOST)]
    recent = sorted((fact for fact in facts if fact.step >= journal.step - _STEPS), key=lambda fact: fact.clock)
    return [
        f"{'backward()' if fact.kind == 'backward' else 'autograd.grad()'}{_at(fact.site)}{' within another' if fact.nested else ''}"
        if isinstance(fact, BackwardFact)
        else f"{fact.type_name}.step(){_at(fact.site)}"
        for fact in recent[-_MOST:]
    ]


def _at(site: CallSite | None) -> str:
    return "" if site is None else f" at {shown_path(site.code.co_filename)}:{site.line}"
