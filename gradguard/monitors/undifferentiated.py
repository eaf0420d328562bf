"""What is made to be differentiated and is part of no loss: gradients taken with create_graph=True, results of custom Functions. Part of
GG308."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from gradguard.analysis.graph.walk import root_nodes, walk
from gradguard.core.callsite import CallSite
from gradguard.instrumentation.facts import BackwardFact, CallableRef
from gradguard.instrumentation.fault_barrier import barred
from gradguard.monitors.findings import Finding, TraceNext
from gradguard.monitors.monitor import Monitor
from gradguard.torch_compat.private_api import node_sequence

if TYPE_CHECKING:
    from gradguard.instrumentation.journal import Journal

_ENOUGH = 3  # calls of one line in a row
_MOST_NODES = 20_000
_MOST = 64


class Made(NamedTuple):
    """Nodes that one `autograd.grad(..., create_graph=True)` has made, or the one node of a custom Function's call.

    Attributes:
        seq: the first node's number; `end` is that of the first later one.
        stack: the user's frames around it, innermost first.
        function: the custom Function.
    """

    seq: int
    end: int
    step: int
    clock: int
    stack: tuple[CallSite, ...]
    function: CallableRef | None = None


@dataclass(frozen=True, eq=False)
class UnusedGraph(Finding):
    """Nodes were made, and no later graph has any of them."""

    CODE = "GG308"

    made: Made
    backward: BackwardFact


class _Open:
    """The newest nodes of a line, and whether a later graph has any of them."""

    __slots__ = ("after", "made", "used")

    def __init__(self, made: Made) -> None:
        self.made = made
        self.after: BackwardFact | None = None  # the first backward call since
        self.used = False


class Undifferentiated(Monitor):
    """Which nodes that were made to be differentiated a backward call has gone through, in traced steps."""

    PART = "watch of what is made to be differentiated"

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._open: dict[tuple[CallSite, ...], _Open] = {}  # the newest of each line, as reached by this way
        self._unused: dict[tuple[CallSite, ...], int] = {}

    @barred
    def made(self, made: Made) -> list[Finding]:
        """Nodes were made; what became of those that the same line made before is known by now."""
        if not made.stack or made.end == made.seq:
            return []
        found: list[Finding] = []
        before = self._open.pop(made.stack, None)
        if before is not None and before.made.step < made.step and before.after is not None:
            looked_at = before.made.function is None and self._watched(before.made)
            seen = -1_000 if before.used or looked_at else self._unused.get(made.stack, 0) + 1
            self._unused[made.stack] = seen
            if seen == 1:
                found.append(TraceNext(None))  # the next steps are traced
            elif seen == _ENOUGH:
                found.append(UnusedGraph(None, before.made, before.after))
        while len(self._open) >= _MOST:
            self._open.pop(next(iter(self._open)))
        self._open[made.stack] = _Open(made)
        return found

    @barred
    def went_through(self, call: BackwardFact, roots: tuple[Any, ...]) -> None:
        """A call has gone through the graph of these roots."""
        pending = [each for each in self._open.values() if not each.used and each.made.clock != call.clock]
        for each in pending:
            each.after = each.after or (call if call.kind == "backward" else None)
        if not pending:
            return
        first = min(each.made.seq for each in pending)
        for i, (node, _) in enumerate(walk(root_nodes(roots))):
            seq = node_sequence(node)
            if i > _MOST_NODES:
                for each in pending:  # not known
                    each.used = True
                return
            if seq < first:
                continue
            met = [each for each in pending if each.made.seq <= seq < each.made.end]
            for each in met:
                each.used = True
                pending.remove(each)
            if not pending:
                return

    def _watched(self, made: Made) -> bool:
        """Whether something computed since was detached, or turned into a number: it may be what is made of these gradients."""
        journal, since = self._journal, made.clock
        until = next((fact.clock for fact in journal.steps if fact.clock > since), None)
        cuts = [fact.cut for fact in journal.escapes if fact.cut is not None] + [cut for _, cut in journal.cuts()]
        roots = {seq for fact in journal.backwards if fact.clock > since for seq in fact.root_seqs}
        return any(
            since < cut.clock and (until is None or cut.clock < until) and any(seq >= made.seq and seq not in roots for seq in cut.sources)
            for cut in cuts
        )
