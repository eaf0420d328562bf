"""GG304, the silent form: every path from the loss to a leaf leads through an operation whose derivative is zero."""

from __future__ import annotations

from collections import deque
from typing import Any

from gradguard.diagnosis import Diagnosis, Fix
from gradguard.evidence.graph import is_accumulate, op_name
from gradguard.rules.gradient_path import lost_path
from gradguard.rules.gradient_path.places import function_word, same_place
from gradguard.rules.incident import Incident
from gradguard.torch_internals import node_sequence

_ZERO = frozenset({
    "RoundBackward0", "RoundBackward1", "FloorBackward0", "CeilBackward0", "TruncBackward0", "SignBackward0", "SgnBackward0",
    "BernoulliBackward0",
    "BernoulliBackward1", "BernoulliBackward2", "FloorDivideBackward0", "HeavisideBackward0",
})  # fmt: skip
_TRIES = 3  # graphs of one backward line that are looked at in one run
_LIMIT = 20_000


def screen(memory: dict[str, Any], moment: str, facts: dict[str, Any], traced: bool) -> bool:
    """Whether this line's graph is still to be looked at."""
    call = facts["call"]
    return lost_path.screen(memory, moment, facts, traced) or (
        call is not None and memory.get("GG304 looks", {}).get(call.site, 0) < _TRIES
    )


def recognise(incident: Incident) -> Diagnosis | None:
    """Speaks only where all gradients are zero for sure."""
    call = incident.call
    if call is None or call.nested or not incident.root_nodes:
        return None
    looks: dict[Any, int] = incident.memory.setdefault("GG304 looks", {})
    tries = looks.get(call.site, 0)
    if tries >= _TRIES:
        return None
    looks[call.site] = tries + 1
    stops = _stops(incident.root_nodes)
    if not stops:
        return None
    node = max(stops, key=node_sequence)
    place = incident.place_of_node(node_sequence(node))
    op = op_name(node)
    root = incident.roots[0]
    name = lost_path.root_name(incident, root)
    result = place.targets[0] if place is not None and place.targets else None
    related = []
    if incident.place is not None and not same_place(incident.place, place):
        related.append(incident.place.span("runs, and every gradient is exactly zero", "backward"))
    return Diagnosis(
        code="GG304", name="non-differentiable-op", severity="warning",
        headline=f"every gradient of `{name}` is exactly zero: its only way to the parameters leads through `{op}`{function_word(place)}",
        culprit=place.span(f"`{op}` has the derivative zero: nothing comes back through "
                           f"{f'`{result}`' if result else 'it'}", "culprit") if place is not None else None,
        related=related, tensors=[lost_path.facts(name, root)],
        explanation=f"`{op}` is flat between its jumps. PyTorch keeps the graph and multiplies every gradient by zero, so "
                    f"training stands still without an error.",
        fixes=[Fix(title=f"Compute the loss without `{op}`, or pass the gradient straight through: `x + ({op}(x) - "
                         f"x).detach()`", safety="manual")],
    )  # fmt: skip


def _stops(roots: list[Any]) -> list[Any]:
    """The zero-derivative nodes that bar every path from the roots to a leaf; empty if any path is open (or the graph is too large)."""
    seen: set[Any] = set()
    stops = []
    queue = deque(roots)
    while queue:
        node = queue.popleft()
        if node in seen:
            continue
        seen.add(node)
        if len(seen) > _LIMIT or is_accumulate(node):
            return []
        if node.name() in _ZERO:
            stops.append(node)
            continue
        sources = [source for source, _ in node.next_functions if source is not None]
        if not sources:  # not a leaf that learns, and nothing to say of it
            return []
        queue.extend(sources)
    return stops
