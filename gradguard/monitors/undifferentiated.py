"""Gradients taken with create_graph=True, so that a term of the loss can be made of them, and of which no loss is made. Part of GG308."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradguard.analysis.graph.walk import root_nodes, walk
from gradguard.core.callsite import CallSite
from gradguard.instrumentation.facts import BackwardFact
from gradguard.instrumentation.fault_barrier import barred
from gradguard.monitors.findings import Finding, TraceNext
from gradguard.monitors.monitor import Monitor
from gradguard.torch_compat.private_api import node_sequence

if TYPE_CHECKING:
    from gradguard.instrumentation.journal import Journal

_ENOUGH = 3  # calls of one line in a row
_MOST_NODES = 20_000
_MOST = 64


@dataclass(frozen=True, eq=False)
class UnusedGradients(Finding):
    """Gradients were taken with a graph, and no later graph has any of their nodes."""

    CODE = "GG308"

    taken: BackwardFact
    backward: BackwardFact


class _Taken:
    """One `autograd.grad(..., create_graph=True)`: the numbers of the nodes that it made, and whether a later graph has any of them."""

    __slots__ = ("call", "end", "used")

    def __init__(self, call: BackwardFact, end: int) -> None:
        self.call = call
        self.end = end
        self.used = False


class Undifferentiated(Monitor):
    """Which gradients with a graph of their own a backward call has gone through, in traced steps."""

    PART = "watch of gradients with graphs of their own"

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._taken: dict[tuple[CallSite, ...], _Taken] = {}  # the newest of each line, as reached by this way
        self._unused: dict[tuple[CallSite, ...], int] = {}
        self._last: BackwardFact | None = None

    @barred
    def taken(self, call: BackwardFact, end: int) -> list[Finding]:
        """A gradient was taken; what became of the one that the same line took before is known by now."""
        if not call.stack or end == call.seq:
            return []
        found: list[Finding] = []
        before = self._taken.pop(call.stack, None)
        if before is not None and before.call.step < call.step and self._last is not None and self._last.clock > before.call.clock:
            seen = -1_000 if before.used or self._watched(before) else self._unused.get(call.stack, 0) + 1
            self._unused[call.stack] = seen
            if seen == 1:
                found.append(TraceNext(None))  # the next steps are traced
            elif seen == _ENOUGH:
                found.append(UnusedGradients(None, before.call, self._last))
        while len(self._taken) >= _MOST:
            self._taken.pop(next(iter(self._taken)))
        self._taken[call.stack] = _Taken(call, end)
        return found

    @barred
    def went_through(self, call: BackwardFact, roots: tuple[Any, ...]) -> None:
        """A call has gone through the graph of these roots."""
        open_ones = [each for each in self._taken.values() if not each.used and each.call is not call]
        if call.kind == "backward":
            self._last = call
        if not open_ones:
            return
        first = min(each.call.seq for each in open_ones)
        for i, (node, _) in enumerate(walk(root_nodes(roots))):
            seq = node_sequence(node)
            if i > _MOST_NODES:
                for each in open_ones:  # not known
                    each.used = True
                return
            if seq >= first:
                for each in open_ones:
                    each.used = each.used or each.call.seq <= seq < each.end

    def _watched(self, taken: _Taken) -> bool:
        """Whether something computed since was detached, or turned into a number: it may be what is made of these gradients."""
        journal, since = self._journal, taken.call.clock
        until = next((fact.clock for fact in journal.steps if fact.clock > since), None)
        cuts = [fact.cut for fact in journal.escapes if fact.cut is not None] + [cut for _, cut in journal.cuts()]
        roots = {seq for fact in journal.backwards if fact.clock > since for seq in fact.root_seqs}
        return any(
            since < cut.clock
            and (until is None or cut.clock < until)
            and any(seq >= taken.call.seq and seq not in roots for seq in cut.sources)
            for cut in cuts
        )
