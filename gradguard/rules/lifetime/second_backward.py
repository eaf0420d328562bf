"""What the five rules of this family share: the facts of a second backward, and which of the five causes they show.

PyTorch says the same words for all of them. What tells them apart: whether the root is one that was used before, whether the
old graph came in as an addend of the root, whether it crossed from one turn of the loop to the next, and whether what
carried it is made anew in each turn.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import torch

from gradguard.analysis.graph.consumed import Consumed, Link, consumed, freeing_call, freeing_calls
from gradguard.analysis.graph.older_releases import output_shape
from gradguard.analysis.graph.walk import is_accumulate, leaves
from gradguard.analysis.history.carried_graphs import Carrier, Carriers, called_in, previous_turn
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.optimizer_contents import trained_by
from gradguard.analysis.live.stores import Store
from gradguard.analysis.places.source import function_def, resolve
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.index import only, program_of
from gradguard.core.callsite import CallSite
from gradguard.instrumentation.facts import BackwardFact
from gradguard.torch_compat.private_api import grad_fn_of, node_sequence

Cause = Literal["same root", "shared", "carried", "accumulated", "precomputed"]

MESSAGES = ("backward through the graph a second time", "already been freed", "after they have already been freed")

# ops through which a loss stays a sum of losses
_SUMS = {
    *("Add", "Sub", "Sum", "Mean", "Stack", "Cat", "Neg", "Mul", "Div", "Unsqueeze", "Squeeze", "View"),
    *("UnsafeView", "Reshape", "ReshapeAlias", "Clone", "Select", "Unbind", "Expand", "ToCopy", "Alias"),
}


@dataclass(eq=False)
class Study:
    """The facts of one second backward."""

    incident: Incident
    graph: Consumed
    finder: Carriers
    previous: BackwardFact | None  # the last time the program came to this same call
    freed_by: BackwardFact | None = None
    cause: Cause | None = None
    inner: bool = False  # the freed graph is a custom Function's own
    carrier: Carrier | None = None
    carriers: list[Carrier] = field(default_factory=list)

    @property
    def call(self) -> BackwardFact | None:
        return self.incident.call


def study(incident: Incident) -> Study | None:
    """The facts, worked out once an incident; None where the graph does not show a second backward."""
    if "_lifetime" not in vars(incident):
        vars(incident)["_lifetime"] = _study(incident)
    found: Study | None = vars(incident)["_lifetime"]
    return found


def _study(incident: Incident) -> Study | None:
    roots = [node for node in incident.root_nodes if not is_accumulate(node)]
    if not roots or incident.where not in ("backward", "grad"):
        return None
    call, journal = incident.call, incident.journal
    graph = consumed(roots, journal, call)
    if not graph.freed:
        return None
    result = Study(incident, graph, Carriers(graph, journal, incident.frames, incident.names, call), previous_turn(journal, call))
    if call is not None and call.nested:
        _inner(result)
    elif any(root in graph.used for root in roots):
        _used_root(result, roots)
    else:
        _entered(result)
    return result


def _inner(result: Study) -> None:
    """The failing call stands in a custom Function's backward."""
    call = result.call
    assert call is not None
    result.inner = True
    result.cause = "shared"
    seqs = [node_sequence(node) for node in result.graph.freed]
    result.freed_by = freeing_call(result.incident.journal, max(seqs), call, nested=True) or freeing_call(
        result.incident.journal, max(seqs), call
    )


def _used_root(result: Study, roots: list[Any]) -> None:
    journal, call = result.incident.journal, result.call
    used = [root for root in roots if root in result.graph.used]
    seqs = {node_sequence(root) for root in used}
    earlier = [fact for fact in journal.backwards if fact is not call and not fact.retain_graph and seqs & set(fact.root_seqs)]
    if earlier:
        result.cause, result.freed_by = "same root", earlier[0]
        return
    newest = max(seqs)
    result.freed_by = freeing_call(journal, newest, call)
    # a freed root that no call is known to have begun at: begun at before the guard was there, or a part of a larger loss
    result.cause = "same root" if result.freed_by is None else "shared"


def _entered(result: Study) -> None:
    """A new root that leads into an old graph."""
    journal, call, graph = result.incident.journal, result.call, result.graph
    links = graph.links
    if not links:
        return
    begun = {seq for fact in journal.backwards if fact is not call for seq in fact.root_seqs}
    sums = _summands(graph)
    added = [link for link in links if _is_addend(result, link, sums, begun)]
    freeing = _freed_by(result, added[0]) if added else None
    if added and (freeing is None or freeing.kind == "backward"):
        result.cause = "accumulated"
        link = added[0]
        exact = [
            fact
            for fact in journal.backwards
            if fact is not call and node_sequence(link.source) in fact.root_seqs and not fact.retain_graph
        ]
        result.freed_by = exact[-1] if exact else _freed_by(result, link)
        result.carrier = result.finder.of(link, _border(result, link))
        result.carriers = [result.carrier]
        return
    crossing = [link for link in links if result.previous is not None and link.seq < result.previous.seq]
    chosen = crossing or links
    result.carriers = [result.finder.of(link, _border(result, link)) for link in chosen[:6]]
    carrier = result.carrier = _clearest(result.carriers)
    result.freed_by = _freed_by(result, carrier.link)
    roots = [node_sequence(root) for root in graph.roots]
    if result.freed_by is not None and max(roots) < result.freed_by.seq:
        result.cause = "shared"  # this loss was there already when the first one was backpropagated: two losses of one forward pass
    elif is_overwritten(carrier):
        result.cause = "carried"
    elif not crossing:
        result.cause = "precomputed" if carrier.store is not None and carrier.store.relation in ("cache", "init") else "shared"
    elif carrier.renewal == "each step":
        result.cause = "carried"
    elif carrier.renewal in ("once", "unknown") and _made_in_this_turn(result, carrier):
        result.cause = "shared"
    elif carrier.renewal == "once" or carrier.how != "unknown":
        result.cause = "shared" if _belongs_to_another(result, carrier) else "precomputed"
    else:
        result.cause = "carried" if carrier.renewal == "unknown" and not result.incident.journal.ops else "precomputed"


def is_overwritten(carrier: Carrier) -> bool:
    """Whether what carries the old graph is a parameter: only a write in place gives a parameter a history."""
    return isinstance(carrier.tensor, torch.nn.Parameter) and not carrier.tensor.is_leaf


def binding_store(result: Study, carrier: Carrier) -> Store | None:
    """The statement that binds what a carrier holds: its store, or, where a function that makes this step's loss returns the value as
    well, the statement of that function which binds it."""
    store = carrier.store
    program = None if store is None else program_of(store.source)
    loss = result.finder.site(result.graph.roots[0])
    if store is None or program is None or carrier.name is None or loss is None or loss.source is not store.source:
        return store
    origin = only(program.origins(store.statement, carrier.name))
    if origin is None or loss.statement is None or program.function(origin) is not program.function(loss.statement):
        return store
    return Store(store.source, origin, store.relation)


def _made_in_this_turn(result: Study, carrier: Carrier) -> bool:
    """Whether a loop around the loop of the losses makes the value anew, and no optimizer has stepped since it was made."""
    place = None if result.call is None else resolve(result.call.site)
    store, made = carrier.store, carrier.made
    source, statement = (store.source, store.statement) if store is not None else (made.source, made.statement) if made else (None, None)
    if place is None or any(fact.seq > carrier.link.seq for fact in result.incident.journal.steps):
        return False
    if source is None or statement is None:  # nothing tells where it was made: two loops and no step between are all there is to go by
        return len(place.enclosing_loops) > 1
    around = next((above for above in source.ancestors(statement) if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef))), None)
    # backward() may stand in a helper: the loops are then those around the call of it
    loops = [loop for site in result.call.stack for loop in _loops_at(site)] if result.call is not None else []
    if any(source.stands_in(statement, loop) or (around is not None and around.name in called_in(loop)) for loop in loops[1:]):
        return True
    return around is not None and result.call is not None and (_called_in_a_loop(around, result.call) or _iterated(around, result.call))


def _loops_at(site: CallSite) -> Sequence[ast.AST]:
    place = resolve(site)
    return () if place is None else place.enclosing_loops


def _called_in_a_loop(function: ast.FunctionDef | ast.AsyncFunctionDef, call: BackwardFact) -> bool:
    """Whether the call under way of this function, or of a caller of its, stands in a loop: each turn makes its variables anew."""
    for depth, site in enumerate(call.stack):
        node = function_def(site.code)
        if isinstance(node, type(function)) and (node.name, node.lineno) == (function.name, function.lineno):
            return any(place is not None and place.enclosing_loops for place in map(resolve, call.stack[depth + 1 :]))
    return False


def _iterated(function: ast.FunctionDef | ast.AsyncFunctionDef, call: BackwardFact) -> bool:
    """Whether a loop around the call under way runs through a generator of this function that is made anew in each turn of another."""
    if not any(inside(function, ast.Yield, ast.YieldFrom)):
        return False
    places = [resolve(site) for site in call.stack]
    for depth, place in enumerate(places):
        for number, loop in enumerate(place.enclosing_loops if place is not None else ()):
            if isinstance(loop, ast.For) and function.name in called_in(loop.iter):
                further = place is not None and len(place.enclosing_loops) > number + 1
                return further or any(outer is not None and outer.enclosing_loops for outer in places[depth + 1 :])
    return False


def _border(result: Study, link: Link) -> int | None:
    """Where the present begins: at the last call of this place, or, for a tensor younger than that, at the call that freed it."""
    if result.previous is not None and link.seq < result.previous.seq:
        return result.previous.seq
    freed_by = _freed_by(result, link)
    return None if freed_by is None else freed_by.seq


def _clearest(carriers: list[Carrier]) -> Carrier:
    """The carrier that is best known; of equals the newest."""
    return max(carriers, key=lambda carrier: (carrier.store is not None, bool(carrier.names), carrier.made is not None))


def _freed_by(result: Study, link: Link) -> BackwardFact | None:
    """Which earlier call let the values behind this edge go."""
    return next(iter(possibly_freed_by(result, link)), None)


def possibly_freed_by(result: Study, link: Link) -> list[BackwardFact]:
    """The earlier calls that may have let the values behind this edge go, as far as their roots still tell; one where it is known."""
    below = [node for node in result.graph.freed if node in result.graph.below(link.source)]
    newest = max((node_sequence(node) for node in below), default=link.seq)
    candidates = freeing_calls(result.incident.journal, newest, result.call)
    verdicts = [(fact, _reaches(result, fact, link)) for fact in candidates]
    # a backward() that is known to lead there would have failed, had a call before it let the values go; autograd.grad need not have
    # gone all the way down
    sure = [fact for fact, verdict in verdicts if verdict and fact.kind == "backward"]
    return sure[:1] or [fact for fact, verdict in verdicts if verdict is not False] or candidates


def _reaches(result: Study, fact: BackwardFact, link: Link) -> bool | None:
    """Whether an earlier call's root leads to the link's source; None when that root is gone."""
    for tensor in fact.live_roots():
        node = grad_fn_of(tensor)
        if node is not None:
            return link.source in result.graph.below(node)
    return None


def _summands(graph: Consumed) -> set[Any]:
    """The nodes reached from the roots through sums (and products with constants) of single numbers only."""
    found = set(graph.roots)
    stack = list(graph.roots)
    while stack:
        node = stack.pop()
        name = _kind(node)
        if name not in _SUMS:
            continue
        sources = [source for source, _ in node.next_functions if source is not None]
        if name in ("Mul", "Div") and len(sources) > 1:
            continue
        for source in sources:
            if source not in found and not is_accumulate(source):
                found.add(source)
                stack.append(source)
    return found


def _kind(node: Any) -> str:
    """`Add` of `AddBackward0`."""
    return str(node.name()).rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")


def _is_addend(result: Study, link: Link, sums: set[Any], begun: set[int]) -> bool:
    """Whether the edge adds an earlier loss to this one: a single number, through sums alone, that a backward had begun at."""
    graph = result.graph
    border = _border(result, link)
    for node in link.carriers:
        if node not in sums or node in graph.roots or _size(node) != 1 or (border is not None and node_sequence(node) >= border):
            continue
        if node_sequence(node) in begun:
            return True
        # a list of losses: the earlier root was a sum that held this one, and is gone itself; its successor stands beside it in the sum
        above = (graph.above([node]) & sums) - {node}
        if all(_size(other) == 1 or _kind(other) in ("Stack", "Cat") for other in above) and any(
            other not in graph.used
            and other not in above
            and other is not node
            and _size(other) == 1
            and node_sequence(other) >= (border or 0)
            and result.finder.alike(other, node)
            for other in sums
        ):
            return True
    return False


def _size(node: Any) -> int | None:
    shape = output_shape(node)
    return None if shape is None else prod(shape)


def _belongs_to_another(result: Study, carrier: Carrier) -> bool:
    """Whether the old part belongs to parameters that another optimizer trains than the one that steps after this call: a batch
    of a generator's in a critic's own loop."""
    below = {id(leaf) for leaf in leaves([carrier.link.source])}
    owners = [optimizer for optimizer in result.incident.names.optimizers() if below & trained_by(optimizer)]
    stepping = [
        fact.optimizer() for fact in result.incident.journal.steps if result.previous is not None and fact.seq >= result.previous.seq
    ]
    here = [optimizer for optimizer in stepping if optimizer is not None]
    if not owners or not here or carrier.store is None:
        return False
    return not any(below & trained_by(optimizer) for optimizer in here)
