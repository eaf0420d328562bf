"""The tensor that carried values over a parameter update: made before it, used after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradguard.analysis.graph.walk import walk
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.frames import FrameView
from gradguard.analysis.places.source import resolve
from gradguard.core.diagnosis import Role, SourceSpan
from gradguard.rules.inplace.aliases import assigned_before
from gradguard.torch_compat.private_api import ACCUMULATE_SEQ, node_sequence


@dataclass
class Carried:
    """`name` is what the frames call it; `made` and `used` are lines of the user's, as far as they are known."""

    name: str | None
    made: SourceSpan | None
    used: SourceSpan | None
    is_root: bool
    node: Any


def carried_over(incident: Incident, target: Any, boundary: int) -> Carried | None:
    """The value of the root's graph that was made before sequence number `boundary` and leads to `target`."""
    roots = incident.root_nodes
    users: dict[Any, list[tuple[Any, int]]] = {}
    for node, edges in walk(roots):
        for edge in edges:
            users.setdefault(edge.source, []).append((node, edge.output))
    leading: set[Any] = {target}
    queue = [target]
    crossing: list[tuple[Any, Any, int]] = []
    while queue:
        node = queue.pop()
        for user, output in users.get(node, ()):
            if node_sequence(user) >= boundary:
                crossing.append((user, node, output))
                continue
            if user not in leading:
                leading.add(user)
                queue.append(user)
    old_root = next((root for root in roots if root in leading and node_sequence(root) < boundary), None)
    if old_root is not None:
        name = next((incident.names.of(tensor) for tensor in incident.roots if tensor.grad_fn is old_root), None) or incident.names.of_node(
            old_root
        )
        return Carried(name, _made(incident, old_root, name), None, True, old_root)
    crossing = [edge for edge in crossing if node_sequence(edge[1]) < ACCUMULATE_SEQ]
    crossing.sort(key=lambda edge: -node_sequence(edge[1]))
    best: Carried | None = None
    for user, node, output in crossing[:16]:
        name = incident.names.of_node(node, output)
        if best is None or (best.name is None and name is not None):
            op = incident.journal.op_at(node_sequence(user))
            place = None if op is None else resolve(op.site)
            used = None if place is None else place.span("used here, after the update", "carried")
            best = Carried(name, _made(incident, node, name), used, False, node)
    return best


def _made(incident: Incident, node: Any, name: str | None) -> SourceSpan | None:
    """Where the variable was assigned in the frames, else where its op was called."""
    if name is not None:
        for view in incident.user_frames:
            if name in view.locals:
                found = assigned_in(view, name, f"`{name}` was made here, before the update", "carried")
                if found is not None:
                    return found
    op = incident.journal.op_at(node_sequence(node))
    place = None if op is None else resolve(op.site)
    return (
        None
        if place is None
        else place.span(f"`{name}` was made here, before the update" if name else "made here, before the update", "carried")
    )


def assigned_in(view: FrameView, name: str, label: str, role: Role) -> SourceSpan | None:
    """The only assignment to a variable before the frame's line (the last of several)."""
    place = resolve(view.site)
    statement = None if place is None else assigned_before(place, name)
    if place is None or place.source is None or statement is None or statement.value is None:
        return None
    return place.source.span_of(statement.value, label, role)
