"""A list that collects the tensors of one step and is never emptied: those of the steps before are still in it."""

from __future__ import annotations

import ast

from gradguard.analysis.history.carried_graphs import Carrier
from gradguard.analysis.live.alive_tensors import node_of
from gradguard.analysis.live.contents import lookup, tensors_in
from gradguard.analysis.live.stores import view_of
from gradguard.analysis.program.bindings import dotted, targets_of
from gradguard.analysis.program.defuse import reads_of
from gradguard.analysis.program.expressions import calls_inside, inside
from gradguard.core.diagnosis import Fix
from gradguard.core.safe_read import peek
from gradguard.rules.lifetime.second_backward import Study
from gradguard.torch_compat.private_api import node_sequence

_TAKING = frozenset({"pop", "popleft", "remove"})


def emptying(facts: Study, carrier: Carrier, name: str) -> Fix | None:
    """Emptying the list before each forward pass; None where it is a memory on purpose (bounded, or its items are taken out again), or
    where nothing that this step has put in goes into this step's loss.

    Args:
        name: what the message calls it, in backticks.
    """
    holding, store, previous = carrier.holding, carrier.store, facts.previous
    written = carrier.name
    if holding is None or store is None or previous is None or written is None:
        return None
    view = view_of(holding.frame, facts.finder.frames)
    kept = peek(holding.owner, holding.attribute, None) if holding.owner is not None else None if view is None else lookup(view, written)
    if type(kept) not in (list, dict) or _taken_out(store.source.tree, written):
        return None
    nodes = [node for tensor in tensors_in(kept) if (node := node_of(tensor)) is not None]
    if not any(node_sequence(node) >= previous.seq and node in facts.graph.users and node not in facts.graph.tainted for node in nodes):
        return None
    return Fix(
        title=f"empty {name} before each forward pass: `{written}.clear()`",
        safety="unsafe",
        detail="this step's loss needs what this step puts in, with its graph; what the steps before have put in is still there too",
    )


def _taken_out(tree: ast.AST | None, name: str) -> bool:
    taken = any(isinstance(call.func, ast.Attribute) and dotted(call.func.value) == name for call in calls_inside(tree, *_TAKING))
    targets = (target for node in inside(tree, ast.Delete) for target in node.targets)
    deleted = any(isinstance(target, ast.Subscript) and dotted(target.value) == name for target in targets)
    shortened = any(name in map(dotted, targets_of(node)) and reads_of(node.value, name) for node in inside(tree, ast.Assign))
    return taken or deleted or shortened
