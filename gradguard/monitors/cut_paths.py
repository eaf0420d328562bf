"""Where the path to parameters that get no gradient was cut: looked for in one traced step, while the graph is alive."""

from __future__ import annotations

import weakref
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from gradguard.analysis.graph.walk import root_nodes, walk
from gradguard.core.callsite import CallSite
from gradguard.instrumentation.facts import BackwardFact, Cut
from gradguard.instrumentation.fault_barrier import barred
from gradguard.instrumentation.journal import Journal
from gradguard.instrumentation.tensor_refs import TensorRef, UncountedRef
from gradguard.monitors.monitor import Backward, Monitor
from gradguard.torch_compat.private_api import node_sequence

if TYPE_CHECKING:
    from gradguard.monitors.view import View

_MOST_NODES = 8_192
Stack = tuple[CallSite, ...]
_CALLS = 16  # backward calls of one step whose losses are looked at


class LoneLoss(NamedTuple):
    """A loss from which no backward starts.

    Attributes:
        made: where it is computed.
        taken: where its number is taken.
        backward: where the step's backward starts, from another loss.
    """

    made: CallSite
    taken: CallSite | None
    backward: CallSite | None


class Blocked(NamedTuple):
    """A custom Function in the graph of a loss whose backward gave no gradient to what parameters are behind.

    Attributes:
        kind: the Function's class.
        applied: where it was called.
        backward: where the backward call was.
        only: the one of the graph edges behind which the parameters are, and how many edges there are.
    """

    kind: weakref.ref[type]
    applied: CallSite | None
    backward: CallSite | None
    only: tuple[int, int]


class NewLeaf(NamedTuple):
    """A tensor that is no Parameter, in which the graph of a loss ends.

    Attributes:
        before: the one of the step before.
        ref: the one of the last step looked at.
        site: where its requires_grad was switched on, as far as that was seen.
    """

    before: weakref.ref[Any] | None
    ref: weakref.ref[Any]
    site: CallSite | None


class Severed(Monitor):
    """The cuts between some parameters and the losses of a step.

    Args:
        journal: of this thread; the op probe writes there which cuts it met (`Journal.severed`).
    """

    PART = "look-out for cut paths to parameters"

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        # cuts whose result went into a loss, ids of what is behind them, and the user's frames around the backward calls of those losses
        self._used: dict[int, tuple[Cut, frozenset[int], set[Stack]]] = {}
        self._met: dict[int, tuple[Cut, frozenset[int]]] = {}  # all cuts that were noted, whatever became of their results
        # losses of which only the number was taken, by where they were made: where it was, what is behind them
        self._lone: dict[CallSite, tuple[CallSite | None, frozenset[int]]] = {}
        self._reached: dict[int, set[tuple[Blocked, ...]]] = {}  # parameters that a loss's graph leads to: through which Functions
        self.filled: set[int] = set()  # parameters that a backward call did fill, whatever became of it
        self._roots: set[CallSite] = set()  # where the losses that backward started from were made
        self._loss: CallSite | None = None  # where the backward call was
        self._leaves: dict[int, weakref.ref[Any]] = {}  # Parameters that the losses' graphs lead to
        self._ends: set[int] = set()  # ids of cuts in whose results the graph of a loss ends: new leaves
        self._new: dict[Stack, NewLeaf] = {}  # losses whose graphs end in one new leaf, and in nothing else

    @barred
    def arm(self, parameters: list[weakref.ref[Any]]) -> None:
        """From here on, cuts that have one of these parameters behind them are noted."""
        self._journal.wanted = {id(p): ref for ref in parameters if (p := ref()) is not None}
        self._journal.severed = []
        self._used, self._lone, self._met, self._reached, self._leaves = {}, {}, {}, {}, {}
        self._ends, self._new = set(), {}
        self.filled = set()

    @barred
    def disarm(self) -> None:
        """That was enough."""
        self._journal.wanted = {}
        self._journal.severed = []

    def on_backward(self, event: Backward, view: View) -> tuple[()]:
        if view.census_until:
            self._look(event.call, event.roots)
        return ()

    def _look(self, call: BackwardFact, roots: tuple[Any, ...]) -> None:
        """Which of the cut values the call's graph was fed with."""
        journal = self._journal
        if journal.wanted:
            self._reach(call, roots)
        if not journal.severed:
            return
        self._loss = call.site
        for other in islice(reversed(journal.backwards), _CALLS):  # autograd.grad too
            if other.step == call.step:
                self._roots.update(op.site for seq in other.root_seqs if (op := journal.op_at(seq)) is not None)
        for lost, behind, _ in journal.severed:
            made = journal.op_at(lost.sources[0]) if lost.of_loss and lost.sources else None
            if made is not None:
                self._lone.setdefault(made.site, (lost.site, behind))
        noted = {id(cut): (cut, behind, below) for cut, behind, below in journal.severed}
        self._met.update({key: (cut, behind) for key, (cut, behind, _) in noted.items()})
        for i, (node, _) in enumerate(walk(root_nodes(roots))):
            if i > _MOST_NODES:
                return
            leaf = getattr(node, "variable", None)
            if leaf is None:
                seq = node_sequence(node)
                fed_with = journal.fed.get(seq, ()) + journal.partial.get(seq, ()) + journal.guessed.get(seq, ())
            else:  # a new leaf made of old values: `torch.tensor(x.item(), requires_grad=True)`
                cut = journal.cut_of(leaf)
                fed_with = () if cut is None else cut.roots()
                self._ends.update(map(id, fed_with))
            for each in fed_with:
                if id(each) in noted:
                    self._use(id(each), noted, call.stack)

    def _reach(self, call: BackwardFact, roots: tuple[Any, ...]) -> None:
        """Which of the parameters the graph leads to, though the call gave them nothing, and through which custom Functions."""
        wanted = self._journal.wanted
        stack: list[tuple[Any, tuple[Blocked, ...]]] = [(node, ()) for node in root_nodes(roots)]
        seen = set(stack)
        ends: dict[int, Any] = {}
        while stack and len(seen) < _MOST_NODES:
            node, through = stack.pop()
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                ends[id(leaf)] = leaf
            if leaf is not None and id(leaf) in wanted and leaf.grad is not None:
                self.filled.add(id(leaf))
            elif leaf is not None and id(leaf) in wanted:
                self._reached.setdefault(id(leaf), set()).add(through)
            elif isinstance(leaf, nn.Parameter):
                self._leaves[id(leaf)] = TensorRef(leaf)
            kind = getattr(node, "_forward_cls", None)
            count = len(node.next_functions)
            for i, (below, _) in enumerate(node.next_functions):
                if below is None:
                    continue
                by = through
                if isinstance(kind, type):
                    made = self._journal.op_at(node_sequence(node))
                    by = (*through[-2:], Blocked(UncountedRef(kind), None if made is None else made.site, call.site, (i, count)))
                if (below, by) not in seen:
                    seen.add((below, by))
                    stack.append((below, by))

        only = next(iter(ends.values())) if len(ends) == 1 else None
        if only is None or isinstance(only, nn.Parameter):
            self._new.pop(call.stack, None)
        else:
            known, toggle = self._new.get(call.stack), self._journal.toggle_of(only)
            before = None if known is None else known.ref
            self._new[call.stack] = NewLeaf(before, TensorRef(only), None if toggle is None else toggle[1])

    def new_leaf(self, call: BackwardFact) -> NewLeaf | None:
        """The one leaf that a loss is computed from, where each step has made another."""
        found = self._new.get(call.stack)
        return None if found is None or found.before is None or found.before() is not None else found

    def has_new_leaves(self) -> bool:
        """Whether a Parameter that a loss was computed from is gone by now: made for that step alone."""
        return any(ref() is None for ref in self._leaves.values())

    def blocked(self, parameters: list[Any]) -> list[Blocked] | None:
        """The custom Functions between these parameters and losses whose graphs lead to them: one each way has at least one of, or
        none are; None where no graph leads to one of the parameters."""
        found: dict[tuple[Any, Any, tuple[int, int]], Blocked] = {}
        for parameter in parameters:
            ways = self._reached.get(id(parameter))
            if not ways:
                return None
            if () in ways:
                return []
            for each in (function for way in ways for function in way):
                found.setdefault((each.kind, each.applied, each.only), each)
        return list(found.values())

    def _use(self, key: int, noted: dict[int, tuple[Cut, frozenset[int], tuple[Cut, ...]]], around: Stack) -> None:
        """This cut stands between parameters and the loss, and so do those behind it."""
        stack, seen = [key], {key}
        while stack:
            cut, behind, below = noted[stack.pop()]
            self._used.setdefault(id(cut), (cut, behind, set()))[2].add(around)
            further = [id(each) for each in below if id(each) in noted and id(each) not in seen]
            seen.update(further)
            stack += further

    def cuts(self, parameters: list[Any], call: BackwardFact | None = None) -> list[Cut]:
        """The cuts on the way from all of these parameters to a loss; none where one of the parameters has no such cut.

        Args:
            call: of several losses, the one that counts.
        """
        wanted = {id(parameter) for parameter in parameters}
        found = [
            (cut, behind & wanted)
            for cut, behind, stacks in self._used.values()
            if behind & wanted and (call is None or call.stack in stacks)
        ]
        ends = [(cut, behind) for cut, behind in found if id(cut) in self._ends]
        if set().union(*(behind for _, behind in ends)) == wanted:  # what was cut off before that is none of this loss's business
            found = ends
        reached: set[int] = set().union(*(behind for _, behind in found))
        return [cut for cut, _ in found] if reached == wanted else []

    def read_by(self, cuts: list[Cut]) -> set[Stack]:
        """The frames around the backward calls that went through values cut off at the places of these."""
        places = {cut.site for cut in cuts}
        return set().union(*(stacks for cut, _, stacks in self._used.values() if cut.site in places))

    def met(self, parameters: list[Any]) -> list[Cut]:
        """The cuts that all of these parameters stand behind (of one line: together), and whose results may have gone anywhere."""
        wanted = {id(parameter) for parameter in parameters}
        lines: dict[CallSite | None, set[int]] = {}
        for cut, behind in self._met.values():
            lines.setdefault(cut.site, set()).update(behind)
        return [cut for cut, behind in self._met.values() if behind & wanted and lines[cut.site] >= wanted]

    def losses(self, parameters: list[Any]) -> list[LoneLoss]:
        """Losses that all of these parameters stand behind, and of which the steps looked at took nothing but the number."""
        wanted = {id(parameter) for parameter in parameters}
        return [
            LoneLoss(made, taken, self._loss)
            for made, (taken, behind) in self._lone.items()
            if behind >= wanted and made not in self._roots
        ]
