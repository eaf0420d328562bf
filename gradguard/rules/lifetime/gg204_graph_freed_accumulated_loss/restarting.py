"""A sum of several losses that is backpropagated once for all of them, and never begun anew: what was right about it stays."""

from __future__ import annotations

import ast

from gradguard.analysis.history.carried_graphs import Carrier
from gradguard.analysis.places.source import resolve
from gradguard.analysis.program.bindings import assignments_to
from gradguard.analysis.program.defuse import reads_of
from gradguard.core.diagnosis import Fix
from gradguard.fixes.edits import after, patched
from gradguard.rules.lifetime.second_backward import Study


def new_sum(facts: Study, carrier: Carrier, name: str) -> Fix | None:
    """Beginning a new sum after each backward, where several losses were added since the last one; None where they were not."""
    if not _several_added(facts, carrier):
        return None
    line = f"{name} = 0.0"
    return Fix(
        title=f"begin a new sum after each backward(): `{line}`",
        safety="unsafe",
        detail="each backward() then goes through the losses that were added since the last one",
        patch=_after_backward(facts, name, line),
    )


def _several_added(facts: Study, carrier: Carrier) -> bool:
    """Whether the adding instruction ran more than once between the last backward() and this one, in steps that were traced."""
    store, previous = carrier.store, facts.previous
    adding = None if carrier.entry is None else facts.finder.op(carrier.entry)
    if store is None or previous is None or adding is None or not store.covers(resolve(adding.site)):
        return False
    same = [op for op in facts.incident.journal.ops if op[0] >= previous.seq and op[2] is adding.code and op[3] == adding.lasti]
    return len(same) > 1


def _after_backward(facts: Study, name: str, line: str) -> str | None:
    """The line after the backward statement, where its function speaks of the sum by this name and does not read it afterwards."""
    place = resolve(facts.call.site) if facts.call is not None else None
    if place is None or place.source is None or not isinstance(place.statement, ast.Expr):
        return None
    scope = place.enclosing_function or place.source.tree
    if scope is None:
        return None
    reads = reads_of(scope, name)
    known = bool(reads or assignments_to(scope, name))
    end = place.statement.end_lineno or place.statement.lineno
    if not known or any(read.lineno > end for read in reads):
        return None
    return patched(place.source, insert=[after(place.source, place.statement, line)])
