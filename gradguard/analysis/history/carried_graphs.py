"""What carries an old graph into a new one: the variable, attribute or container, where it is filled, and whether it is filled
anew in every step or once.

Used where a graph was freed too early, and where an old graph that was kept by retain_graph=True meets parameters that have
been updated since: `find_carried_state` answers for both.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from inspect import CO_GENERATOR
from typing import Any, Literal

import torch

from gradguard.analysis.graph.consumed import Consumed, Link, consumed, same_place
from gradguard.analysis.graph.walk import is_accumulate, op_name
from gradguard.analysis.live.alive_tensors import node_of
from gradguard.analysis.live.contents import lookup, own_objects, tensors_in
from gradguard.analysis.live.frames import FrameView
from gradguard.analysis.live.holders import Holding, holdings
from gradguard.analysis.live.names import Names
from gradguard.analysis.live.stores import (
    Store,
    relation_in,
    stores_of_attribute,
    stores_of_global,
    stores_of_variable,
    taken_from,
    view_of,
)
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.defuse import Carried, loop_carried, reads_of
from gradguard.analysis.program.expressions import calls_inside, inside, last_part
from gradguard.analysis.program.index import program_of
from gradguard.analysis.program.stored_values import is_run_by_a_hook, puts_result_of
from gradguard.analysis.program.syntax import Function, Source
from gradguard.instrumentation.facts import BackwardFact, OpFact
from gradguard.instrumentation.journal import Journal
from gradguard.torch_compat.private_api import node_sequence

How = Literal["variable", "attribute", "container", "overwritten", "unknown"]
Renewal = Literal["each step", "once", "unknown"]


@dataclass(eq=False)
class Carrier:
    """The tensor through which a new graph reaches into an old one.

    Attributes:
        link: the edge it stands on.
        entry: the node of the present turn that uses it first.
        names: what holds it, as the user would write it; empty when nothing was found.
        how: whether it is still held, and by what ("overwritten": only the graph holds it any more).
        store: the statement that puts it there; the culprit where the value is carried.
        stores: all of them.
        renewal: whether that happens in each step or happened once.
        made: where the tensor was made, if that step was traced.
        holding: who holds it.
        tensor: the tensor, or its successor in the same variable.
    """

    link: Link
    entry: Any = None
    names: list[str] = field(default_factory=list)
    how: How = "unknown"
    store: Store | None = None
    stores: list[Store] = field(default_factory=list)
    renewal: Renewal = "unknown"
    made: ResolvedSite | None = None
    holding: Holding | None = None
    tensor: torch.Tensor | None = None
    value: Any = None  # what the variable holds: the tensor, or a tuple or list of tensors
    read: ast.expr | None = None

    @property
    def name(self) -> str | None:
        return self.names[0] if self.names else None


class Carriers:
    """Finds the carriers of one graph. Holds tensors and frames: for the time of a diagnosis only."""

    def __init__(self, graph: Consumed, journal: Journal, frames: Sequence[FrameView], names: Names, call: BackwardFact | None) -> None:
        self.graph = graph
        self.journal = journal
        self.frames = [view for view in frames if view.is_user]
        self.names = names
        self.call = call
        self.ignore = own_objects(names, frames) | graph.alive.own()

    # -- facts --------------------------------------------------------------------------------------------------------

    def op(self, node: Any) -> OpFact | None:
        return None if is_accumulate(node) else self.journal.op_at(node_sequence(node))

    def site(self, node: Any) -> ResolvedSite | None:
        fact = self.op(node)
        return None if fact is None else resolve(fact.site)

    def made_again(self, node: Any, after: int) -> bool | None:
        """Whether the place that made the node ran again after sequence number `after`; None if it was not traced."""
        fact = self.op(node)
        if fact is None:
            return None
        return any(op[0] >= after and op[2] is fact.code and op[3] == fact.lasti for op in self.journal.ops)

    def alike(self, one: Any, other: Any) -> bool:
        """Whether two nodes were made the same way: by the same line where that is known, by the same ops otherwise."""
        if one.name() != other.name():
            return False
        first, second = self.op(one), self.op(other)
        if first is not None and second is not None:
            return first.code is second.code and first.lasti == second.lasti
        return [_kind(source) for source, _ in one.next_functions] == [_kind(source) for source, _ in other.next_functions]

    # -- search -------------------------------------------------------------------------------------------------------

    def of(self, link: Link, border: int | None) -> Carrier:
        """What carries the tensor on this edge.

        Args:
            border: the sequence number at which this turn (or what is left of this step after the call that freed) begins.
        """
        if border is not None:
            link = replace(link, carriers=(link.source, *(node for node in link.carriers[1:] if node_sequence(node) < border)))
        carrier = Carrier(link, entry=self._entry(link, border))
        carrier.made = self.site(link.source)
        for search in (self._in_loops, self._held, self._grown, self._succeeded):
            search(carrier, border)
            if carrier.names:
                break
        if carrier.renewal == "unknown":
            again = self.made_again(link.source, link.seq + 1 if border is None else border)
            carrier.renewal = "unknown" if again is None else "each step" if again else "once"
        return carrier

    def _entry(self, link: Link, border: int | None) -> Any:
        """The node of the present turn through which the old graph comes in: the first that uses any of the carriers."""
        if border is None:
            return link.user
        users = [user for node in link.carriers for user, _ in self.graph.users.get(node, ()) if user not in link.carriers]
        return min((user for user in users if node_sequence(user) >= border), key=node_sequence, default=link.user)

    def _in_loops(self, carrier: Carrier, border: int | None) -> None:
        """A variable that a loop around the call carries from turn to turn."""
        above = self.graph.above(carrier.link.carriers)
        best: tuple[int, int, FrameView, ResolvedSite, Carried, torch.Tensor] | None = None
        others: list[str] = []
        for depth, view in enumerate(self.frames):
            place = resolve(view.site)
            if place is None or place.source is None:
                continue
            for loop in place.enclosing_loops:
                for carried in loop_carried(loop):
                    value = lookup(view, carried.name)
                    ranked = max(
                        ((self._rank(tensor, carrier, above, border), tensor) for tensor in tensors_in(value)),
                        key=lambda pair: pair[0],
                        default=(0, None),
                    )
                    if not ranked[0] or ranked[1] is None:
                        continue
                    others.append(carried.name)
                    if best is None or ranked[0] > best[0]:
                        best = (ranked[0], depth, view, place, carried, ranked[1])
        if best is None:
            return
        rank, _, view, place, carried, tensor = best
        source = place.source
        assert source is not None
        stores = [Store(source, statement, relation_in(source, statement, place)) for statement in carried.stores]
        carrier.names = [carried.name, *(name for name in dict.fromkeys(others) if name != carried.name)]
        carrier.how = "variable" if rank == 3 else "overwritten"
        carrier.stores, carrier.store = stores, self._best(stores, carrier, ("carried", "fresh"))
        carrier.renewal = "each step"
        carrier.tensor, carrier.value = tensor, lookup(view, carried.name)
        carrier.read = carried.read

    def _rank(self, tensor: torch.Tensor, carrier: Carrier, above: set[Any], border: int | None) -> int:
        """3: it is the very tensor; 2: it is made the same way; 1: it is made from it, on the way to the root."""
        node = node_of(tensor)
        if node is None:
            return 0
        if node in carrier.link.carriers:
            return 3
        if node_sequence(node) >= (carrier.link.seq if border is None else border) and any(
            self.alike(node, old) for old in carrier.link.carriers
        ):
            return 2
        return 1 if node in above else 0

    def _held(self, carrier: Carrier, border: int | None) -> None:
        """Something still holds the very tensor, or one made from it before this step."""
        nodes = list(carrier.link.carriers)
        found: list[Holding] = []
        tensors = self._oldest_first(self.graph.alive.made_by(nodes), nodes)
        for tensor, held in zip(tensors, holdings(tensors, self.frames, self.ignore), strict=True):
            found.extend([*taken_from(tensor, held, self.frames), *held])
        rated = [(rating, holding, stores) for holding in found for rating, stores in [self._stores(holding)] if rating]
        if not rated:
            if found:
                carrier.names = list(dict.fromkeys(holding.name for holding in found))
                carrier.how, carrier.holding, carrier.tensor = "variable", found[0], found[0].tensor
            return
        rated.sort(key=lambda item: -item[0])
        _, holding, stores = rated[0]
        carrier.holding, carrier.tensor = holding, holding.tensor
        carrier.names = list(dict.fromkeys([holding.name, *(other.name for _, other, _ in rated)]))
        carrier.how = "container" if holding.through else "attribute" if holding.owner is not None else "variable"
        carrier.stores = stores
        self._judge(carrier, border)

    def _judge(self, carrier: Carrier, border: int | None) -> None:
        """Chooses the store that speaks for the carrier, and says whether it happens in each step."""
        relations = {store.relation for store in carrier.stores}
        if "cache" in relations:
            carrier.store, carrier.renewal = self._best(carrier.stores, carrier, ("cache",)), "once"
        elif "carried" in relations:
            carrier.store, carrier.renewal = self._best(carrier.stores, carrier, ("carried",)), "each step"
        elif "method" in relations:
            carrier.store = self._best(carrier.stores, carrier, ("method",))
            again = self._runs_each_turn(carrier.store, border)
            carrier.renewal = "unknown" if again is None else "each step" if again else "once"
        else:
            carrier.store, carrier.renewal = self._best(carrier.stores, carrier, ("fresh", "outside", "init")), "once"

    def _runs_each_turn(self, store: Store | None, border: int | None) -> bool | None:
        """Whether a store in a method off the stack happens in each step."""
        function = None if store is None else store.function
        if store is None or not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return None
        if border is not None:
            lines = range(function.lineno, (function.end_lineno or function.lineno) + 1)
            traced = [op for op in self.journal.ops if op[2].co_filename == store.file and op[2].co_firstlineno in lines]
            if any(op[0] >= border for op in traced):
                return True
        if function.name in ("forward", "__call__") or is_run_by_a_hook(store.source, function):
            return True
        called = self._called_around(store)
        if function.name in called or self._is_called_in_loops(store.source, function):
            return True
        return False if called else None

    def _is_called_in_loops(self, source: Source, function: Function) -> bool:
        """Whether a loop on the stack calls a function of its file, by whatever name, or one that calls it."""
        program = program_of(source)
        places = [place for view in self.frames if (place := resolve(view.site)) is not None and place.source is source]
        loops = [loop for place in places for loop in place.enclosing_loops[:1]]
        pending: list[Function] = [function]
        seen: set[Function] = {function}
        while pending and program is not None:
            for call in program.callers(pending.pop()):
                around = program.function(call)
                if any(program.source.stands_in(call, loop) for loop in loops):
                    return True
                if around is not None and around not in seen:
                    seen.add(around)
                    pending.append(around)
        return False

    def _called_around(self, store: Store) -> set[str]:
        """Names of what is called in the loops on the stack, and in the methods beside the store that are called there."""
        called: set[str] = set()
        for view in self.frames:
            place = resolve(view.site)
            for loop in () if place is None else place.enclosing_loops[:1]:
                called |= called_in(loop)
        tree = store.source.tree
        for _ in range(3):
            functions = [node for node in ast.walk(tree or ast.Module([], [])) if isinstance(node, ast.FunctionDef)]
            more = {name for node in functions if node.name in called or node.name == "forward" for name in called_in(node)}
            if more <= called:
                break
            called |= more
        return called

    def _stores(self, holding: Holding) -> tuple[int, list[Store]]:
        """Where the holding is filled, and how well that is known."""
        if holding.frame is not None:
            view = view_of(holding.frame, self.frames)
            if view is None and holding.frame.f_code.co_flags & CO_GENERATOR:  # a generator that waits at its `yield`
                view = FrameView(holding.frame)
            stores = [] if view is None else stores_of_variable(holding.name, view, container=bool(holding.through))
            if stores and all(isinstance(store.statement, (ast.For, ast.AsyncFor)) for store in stores):
                return 1, stores  # what a loop takes out of a container: the container's variable says more
            if stores:
                return 4, stores
            return 0, []  # a parameter: the caller's variable says more
        if holding.owner is not None:
            stores = stores_of_attribute(holding, self.frames)
            return (3 if stores else 1), stores
        stores = stores_of_global(holding.name, self.frames, container=bool(holding.through))
        return (2 if stores else 1), stores

    def _grown(self, carrier: Carrier, border: int | None) -> None:
        """An attribute or outer variable that was updated from the old tensor after its backward, and read again in this step."""
        above = self.graph.above(carrier.link.carriers)
        nodes = [node for node in reversed(self.graph.order) if node in above]
        tensors = self._oldest_first(self.graph.alive.made_by(above), nodes)[:32]
        for tensor, held in zip(tensors, holdings(tensors, self.frames, self.ignore), strict=True):
            for holding in held:
                if holding.frame is not None and holding.owner is None and not view_of(holding.frame, self.frames):
                    continue
                stores = self._stores(holding)[1]
                if holding.owner is None and any(store.relation == "fresh" and not _reads_itself(store, holding.name) for store in stores):
                    continue  # begun anew in each turn, such as a sum
                kept = [store for store in stores if self._outlives_a_turn(store, holding)]
                if kept:
                    carrier.names, carrier.holding, carrier.tensor = [holding.name], holding, tensor
                    carrier.how = "container" if holding.through else "attribute" if holding.owner is not None else "variable"
                    carrier.stores, carrier.store, carrier.renewal = kept, self._best(kept, carrier, ("carried", "method")), "each step"
                    return

    def _outlives_a_turn(self, store: Store, holding: Holding) -> bool:
        """Whether what is stored there is read in a later turn: stored behind the backward call, or made from what it held before."""
        if holding.owner is None:
            return store.relation == "method" or (store.relation == "carried" and _reads_itself(store, holding.name))
        if store.relation == "carried":
            return True
        function = store.function
        if store.relation not in ("method", "fresh") or function is None:
            return False
        names = {f"self.{holding.attribute}", *store.filled(holding.attribute)}  # another object's method has its own name for the owner
        if any(read.lineno <= store.statement.lineno for name in names for read in reads_of(function, name)):
            return True
        return isinstance(function, ast.FunctionDef) and self._called_behind(function.name)

    def _called_behind(self, name: str) -> bool:
        """Whether the frames around call a method of this name behind the running statement, in the same loop, and not before it."""
        behind = before = False
        for view in self.frames:
            place = resolve(view.site)
            if place is None or place.statement is None or not place.enclosing_loops:
                continue
            for call in calls_inside(place.enclosing_loops[0], name):
                behind |= call.lineno > (place.statement.end_lineno or place.statement.lineno)
                before |= call.lineno < place.statement.lineno
        return behind and not before

    def _succeeded(self, carrier: Carrier, border: int | None) -> None:
        """Nothing holds the old tensor any more: a tensor made the same way in this step stands in its place."""
        border = carrier.link.seq + 1 if border is None else border
        successors = []
        for tensor in self.graph.alive.tensors:
            node = node_of(tensor)
            if node is not None and node_sequence(node) >= border and any(self.alike(node, old) for old in carrier.link.carriers):
                successors.append(tensor)
        found = [holding for held in holdings(successors, self.frames, self.ignore) for holding in held]
        for holding in found:
            stores = self._stores(holding)[1]
            if holding.owner is None:  # a variable that functions set; those of the loops around have been looked at
                stores = [store for store in stores if store.relation == "method"]
            if stores:
                carrier.names = list(dict.fromkeys([holding.name, *(other.name for other in found)]))
                carrier.how = "container" if holding.through else "overwritten"
                carrier.holding, carrier.tensor = holding, holding.tensor
                carrier.stores = stores
                carrier.store = self._best(stores, carrier, ("carried", "method", "fresh"))
                carrier.renewal = "each step"
                return

    def _best(self, stores: Sequence[Store], carrier: Carrier, wanted: tuple[str, ...]) -> Store | None:
        """The store that made this very tensor where that is known, else one that can have made it, of the first of the wanted kinds."""
        chosen = [store for kind in wanted for store in stores if store.relation == kind] or list(stores)
        held = None if carrier.tensor is None else node_of(carrier.tensor)
        places = [carrier.made, None if held is None else self.site(held)]
        known = (store for place in places for store in chosen if store.covers(place))
        fitting = (store for store in chosen if held is not None and puts_result_of(store.value, op_name(held)))
        running = (store for place in places for store in chosen if store.runs(place))
        return next(known, None) or next(fitting, None) or next(running, None) or (chosen[0] if chosen else None)

    def _oldest_first(self, tensors: list[torch.Tensor], nodes: list[Any]) -> list[torch.Tensor]:
        return sorted(tensors, key=lambda tensor: nodes.index(node_of(tensor)))


def find_carried_state(
    roots: Sequence[Any], journal: Journal, frames: Sequence[FrameView], names: Names, call: BackwardFact | None = None
) -> Carrier | None:
    """What carries a graph of an earlier step into this one, freed or kept by retain_graph=True; None if nothing is known to.

    Args:
        roots: graph nodes that backward was called on.
        call: this backward call's fact.
    """
    previous = previous_turn(journal, call)
    if previous is None:
        return None
    graph = consumed(roots, journal, call, retained=True)
    older = [link for link in graph.links if link.user is not None and link.seq < previous.seq]
    if not older:
        # what an earlier call went through is known only from its root where nothing is freed: judge by age alone
        made_before = [source for source in graph.order if not is_accumulate(source) and node_sequence(source) < previous.seq]
        crossing = [(source, user, output) for source in made_before for user, output in graph.users.get(source, ())]
        older = [Link(user, source, output, (source,)) for source, user, output in crossing if node_sequence(user) >= previous.seq]
        older.sort(key=lambda link: -link.seq)
    finder = Carriers(graph, journal, frames, names, call)
    found = [finder.of(link, previous.seq) for link in older[:8]]
    return next((carrier for carrier in found if carrier.names), found[0] if found else None)


def previous_turn(journal: Journal, call: BackwardFact | None) -> BackwardFact | None:
    """The last earlier time that the program came to this same backward call."""
    if call is None:
        return None
    return next((fact for fact in reversed(journal.backwards) if fact.index < call.index and same_place(fact, call)), None)


def called_in(node: ast.AST) -> set[str]:
    """The bare names of everything that is called inside a node."""
    return {name for call in inside(node, ast.Call) if (name := last_part(call))}


def _reads_itself(store: Store, name: str) -> bool:
    return store.value is not None and bool(reads_of(store.value, name))


def _kind(node: Any) -> str:
    return "" if node is None else str(node.name())
