"""Which part of a live graph an earlier backward call has used up, and through which edges the rest still leads into it.

A call of backward() uses up everything below its root: the saved values there are let go, and that can be read from the
nodes. Nodes that save nothing (an addition, a view) do not show it; they count as used up when something above them is, or
when an earlier call is known to have begun at them.

The failing call itself has let go of what it went through before it failed. The engine takes the newest node first, so that is
told apart by age: a node newer than the roots of all earlier calls was not used up by any of them; and where an earlier root is
still alive, its graph says exactly what it used up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradguard.analysis.graph.walk import is_accumulate, root_nodes, walk
from gradguard.analysis.live.alive_tensors import Alive
from gradguard.instrumentation.facts import BackwardFact
from gradguard.instrumentation.journal import Journal
from gradguard.torch_compat.private_api import node_sequence, saved_state

MAX_LINKS = 64  # edges into the old graph that are looked at; a recurrent state has a few, an epoch of losses more


@dataclass(frozen=True)
class Link:
    """An edge from a node that no earlier call has used up into the used-up part.

    `carriers` are the nodes whose output may be the tensor that carries the old graph over: `source` first, then the nodes
    above it that save nothing, of which nothing tells on which side of the border they lie.
    """

    user: Any  # None: the root itself is used up
    source: Any
    output: int
    carriers: tuple[Any, ...]

    @property
    def seq(self) -> int:
        return node_sequence(self.source)


@dataclass
class Consumed:
    """The used-up part of the graph under some roots."""

    roots: list[Any]
    freed: list[Any] = field(default_factory=list)
    used: set[Any] = field(default_factory=set)
    tainted: set[Any] = field(default_factory=set)  # every node from which a freed one is reached
    users: dict[Any, list[tuple[Any, int]]] = field(default_factory=dict)
    order: list[Any] = field(default_factory=list)  # all nodes, the newest first
    alive: Alive = field(default_factory=Alive)

    @property
    def links(self) -> list[Link]:
        """The edges into the used-up part that lead to freed nodes, the newest source first."""
        found: list[Link] = []
        for source in self.order:
            if source not in self.used or source not in self.tainted or is_accumulate(source):
                continue
            if source in self.roots:
                found.append(Link(None, source, 0, (source,)))
            for user, output in self.users.get(source, ()):
                if user not in self.used:
                    found.append(Link(user, source, output, self._carriers(source)))
            if len(found) >= MAX_LINKS:
                break
        return found

    def _carriers(self, source: Any) -> tuple[Any, ...]:
        found = [source]
        for node in found:
            if len(found) > 32:
                break
            for user, _ in self.users.get(node, ()):
                if user not in self.used and user not in found and saved_state(user) == "nothing":
                    found.append(user)
        return tuple(found)

    def below(self, node: Any) -> set[Any]:
        """The node and everything it was made from."""
        return {found for found, _ in walk([node])}

    def above(self, nodes: Iterable[Any]) -> set[Any]:
        """Everything in the graph that was made from these nodes, themselves left out."""
        found: set[Any] = set()
        stack = list(nodes)
        while stack:
            for user, _ in self.users.get(stack.pop(), ()):
                if user not in found:
                    found.add(user)
                    stack.append(user)
        return found


def consumed(roots: Sequence[Any], journal: Journal, call: BackwardFact | None = None, *, retained: bool = False) -> Consumed:
    """Reads the graph under the roots.

    Args:
        call: the backward call that is failing; earlier ones are those that can have used something up.
        retained: count what an earlier call went through with `retain_graph=True` as used up too: nothing is freed there,
            yet it is an old graph all the same (the in-place error that follows a mechanical retain_graph=True).
    """
    state = Consumed(list(roots))
    earlier = [fact for fact in journal.backwards if fact is not call and (call is None or fact.index < call.index)]
    begun = {seq for fact in earlier if retained or not fact.retain_graph for seq in fact.root_seqs if seq >= 0}
    past = _Past([fact for fact in earlier if not fact.retain_graph])
    edges = {}
    for node, outgoing in walk(roots):
        state.order.append(node)
        edges[node] = outgoing
        for edge in outgoing:
            state.users.setdefault(edge.source, []).append((node, edge.output))
        if is_accumulate(node):
            continue
        if saved_state(node) == "freed" and past.can_have_freed(node):
            state.freed.append(node)
            state.used.add(node)
        elif node_sequence(node) in begun:
            state.used.add(node)
    for node in state.order:  # newest first: what a used-up node was made from is used up as well
        if node in state.used:
            state.used.update(edge.source for edge in edges[node] if not is_accumulate(edge.source))
    targets = state.used if retained else set(state.freed)
    for node in reversed(state.order):
        if node in targets or any(edge.source in state.tainted for edge in edges[node]):
            state.tainted.add(node)
    return state


class _Past:
    """What the earlier calls can have used up."""

    def __init__(self, calls: Sequence[BackwardFact]) -> None:
        self.calls = calls
        self._below: dict[int, tuple[set[Any], bool]] = {}

    def can_have_freed(self, node: Any) -> bool:
        """Whether any earlier call can have gone through the node; with no call known, whatever freed it came before the guard."""
        if not self.calls:
            return True
        seq = node_sequence(node)
        return any(
            fact.seq > seq and max(fact.root_seqs, default=-1) >= seq and self._reaches(fact, node) is not False
            for fact in reversed(self.calls)
        )

    def _reaches(self, fact: BackwardFact, node: Any) -> bool | None:
        """Whether a call's roots lead to the node; None where some of them are gone."""
        known = self._below.get(fact.index)
        if known is None:
            roots = fact.live_roots()
            known = self._below[fact.index] = ({found for found, _ in walk(root_nodes(roots))}, len(roots) == len(fact.root_seqs))
        below, whole = known
        return True if node in below else False if whole else None


def freeing_call(journal: Journal, seq: int, call: BackwardFact | None, *, nested: bool | None = None) -> BackwardFact | None:
    """The first call after the node `seq` was made that can have let its saved values go."""
    return next(iter(freeing_calls(journal, seq, call, nested=nested)), None)


def freeing_calls(
    journal: Journal, seq: int, call: BackwardFact | None, *, nested: bool | None = None, retained: bool = False
) -> list[BackwardFact]:
    """The calls that can have let go of the saved values of the node `seq`: begun later than it, at a root made later, not retaining."""
    return [
        fact
        for fact in journal.backwards
        if fact is not call
        and (call is None or fact.index < call.index)
        and fact.seq > seq
        and (retained or not fact.retain_graph)
        and (nested is None or fact.nested == nested)
        and any(root >= seq for root in fact.root_seqs)
    ]


def same_place(one: BackwardFact, other: BackwardFact) -> bool:
    """Whether two calls are the same call of the program, reached the same way: two turns of one loop."""
    return one.site is not None and one.stack == other.stack and one.nested == other.nested
