"""GG304, the silent forms: every path from the loss to a leaf leads through an operation whose derivative is zero, or every path
to some of the parameters does. So does a clamp of a parameter that lies outside the range altogether.

A product of two parameters that are both zero is such an operation too: each one's gradient is a multiple of the other.

The first is certain from the graph alone. Of the second another loss may make up for it: it is told when the optimizer steps and
the gradients of those parameters are exactly zero, for the third time in a row.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import torch

from gradguard.analysis.graph.walk import is_accumulate, leaves, op_name
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import short_list
from gradguard.analysis.live.optimizer_contents import trained_by
from gradguard.analysis.places.sites import function_word, in_words, same_place
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.core.notes import Notes
from gradguard.instrumentation.tensor_refs import TensorRef
from gradguard.rules.gradient_path import lost_path
from gradguard.rules.gradient_path.gg304_non_differentiable_op import zero_products
from gradguard.rules.gradient_path.gg304_non_differentiable_op.out_of_range import outside
from gradguard.torch_compat.private_api import node_sequence

_ZERO = frozenset({
    "RoundBackward0", "RoundBackward1", "FloorBackward0", "CeilBackward0", "TruncBackward0", "SignBackward0", "SgnBackward0",
    "BernoulliBackward0",
    "BernoulliBackward1", "BernoulliBackward2", "FloorDivideBackward0", "HeavisideBackward0",
})  # fmt: skip
_TRIES = 3  # graphs of one backward line that are looked at in one run
_LIMIT = 20_000


@dataclass
class _Barred:
    """Parameters that one backward's line gives a gradient of zero."""

    diagnosis: Diagnosis
    leaves: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    looks: int = 0


@dataclass
class _Looked:
    """How often each backward call's line was looked at, and the parameters that it bars."""

    calls: Counter[Any] = field(default_factory=Counter)
    barred: dict[Any, _Barred] = field(default_factory=dict)


def screen(notes: Notes, moment: str, facts: dict[str, Any], traced: bool) -> bool:
    """Whether this line's graph is still to be looked at, or an optimizer steps whose parameters were barred."""
    if moment == "before_step":
        return any(barred.looks >= _TRIES for barred in notes[_Looked].barred.values())
    call = facts["call"]
    return lost_path.screen(notes, moment, facts, traced) or (call is not None and notes[_Looked].calls[call.site] < _TRIES)


def recognise(incident: Incident) -> Diagnosis | None:
    """Speaks only where gradients are zero for sure."""
    if incident.moment == "before_step":
        return _still_zero(incident)
    call = incident.call
    if call is None or call.nested or not incident.root_nodes:
        return None
    looks = incident.notes[_Looked].calls
    if looks[call.site] >= _TRIES:
        return None
    looks[call.site] += 1
    stops, reached = _stops(incident.root_nodes)
    if not stops:
        return None
    node = max(stops, key=node_sequence)
    if not reached and all(zero_products.factors(stop) is None for stop in stops):
        name = lost_path.root_name(incident, incident.roots[0])
        return _told(
            incident,
            node,
            f"every gradient of {in_words(name)} is exactly zero: its only way to the parameters leads through",
            "every gradient",
        )
    _note(incident, node, stops, reached)
    return None


def _note(incident: Incident, node: Any, stops: list[Any], reached: set[int]) -> None:
    """Remembers the parameters that are behind the bars alone."""
    call = incident.call
    assert call is not None
    barred = incident.notes[_Looked].barred
    trained = set().union(*map(trained_by, incident.names.optimizers()))
    behind = [leaf for leaf in leaves(stops) if id(leaf) not in reached and id(leaf) in trained]
    if not behind:
        barred.pop(call.site, None)
        return
    known = barred.get(call.site)
    if known is None:
        names = [state.full if (state := incident.names.state(leaf)) is not None else "a parameter" for leaf in behind]
        shown = short_list(names, 3)
        factors = zero_products.factors(node)
        if factors is not None:
            told = zero_products.told(incident, node, factors, shown)
        else:
            them = "it" if len(behind) == 1 else "them"
            headline = f"the gradient of {shown} is exactly zero: the only way from the loss to {them} leads through"
            told = _told(incident, node, headline, f"every gradient of {shown}")
        known = barred[call.site] = _Barred(told, [TensorRef(leaf) for leaf in behind])
    known.looks += 1


def _still_zero(incident: Incident) -> Diagnosis | None:
    """The optimizer steps, and no other backward has given those parameters anything."""
    barred = incident.notes[_Looked].barred
    trained = trained_by(incident.optimizer)
    for site, each in list(barred.items()):
        barred_leaves = [leaf for ref in each.leaves if (leaf := ref()) is not None]
        if each.looks < _TRIES or not any(id(leaf) in trained for leaf in barred_leaves):
            continue
        del barred[site]
        if all(leaf.grad is not None and not bool(leaf.grad.any()) for leaf in barred_leaves):
            return each.diagnosis
    return None


def _told(incident: Incident, node: Any, headline: str, what: str) -> Diagnosis:
    place = incident.place_of_node(node_sequence(node))
    op = op_name(node)
    root = incident.roots[0]
    result = place.targets[0] if place is not None and place.targets else None
    related = []
    beyond = outside(node)
    if beyond is not None:
        label = f"`{op}` is flat at the parameter's values: nothing comes back through {f'`{result}`' if result else 'it'}"
        why, fix = beyond.told(), beyond.fix()
    else:
        label = f"`{op}` has the derivative zero: nothing comes back through {f'`{result}`' if result else 'it'}"
        why = (
            f"`{op}` is flat between its jumps. PyTorch keeps the graph and multiplies every gradient by zero, so "
            "what stands before it is not trained, without an error."
        )
        title = f"Compute the loss without `{op}`, or pass the gradient straight through: `x + ({op}(x) - x).detach()`"
        fix = Fix(title=title, safety="manual")
    if incident.place is not None and not same_place(incident.place, place):
        related.append(incident.place.span(f"runs, and {what} is exactly zero", "backward"))
    return Diagnosis(
        code="GG304", name="non-differentiable-op", severity="warning",
        headline=f"{headline} `{op}`{function_word(place)}",
        culprit=place.span(label, "culprit") if place is not None else None,
        related=related, tensors=[lost_path.facts(lost_path.root_name(incident, root), root)], explanation=why, fixes=[fix],
    )  # fmt: skip


def _stops(roots: list[Any]) -> tuple[list[Any], set[int]]:
    """The zero-derivative nodes met on the ways from the roots, and ids of the leaves that open ways lead to.

    No nodes where the graph is too large, or an open way leads to something that is no leaf.
    """
    seen: set[Any] = set()
    stops: list[Any] = []
    reached: set[int] = set()
    queue = deque(roots)
    while queue:
        node = queue.popleft()
        if node in seen:
            continue
        seen.add(node)
        if len(seen) > _LIMIT:
            return [], set()
        if is_accumulate(node):
            reached.add(id(getattr(node, "variable", None)))  # a derivative that is not implemented looks like a leaf's node, and has none
            continue
        if node.name() in _ZERO or outside(node) is not None or zero_products.factors(node) is not None:
            stops.append(node)
            continue
        sources = [source for source, _ in node.next_functions if source is not None]
        if not sources:  # not a leaf that learns, and nothing to say of it
            return [], set()
        queue.extend(sources)
    return stops, reached
