"""When the replicas of a DistributedDataParallel module are compared: at some of an optimizer's steps, right before them."""

from __future__ import annotations

import ast
from typing import Any

from gradguard.probes import replicas
from gradguard.monitors import unaveraged_gradients
from gradguard.analysis.places.source import module_ast
from gradguard.rules.base import Moment
from gradguard.analysis.program.user_calls import last_part, user_files
from gradguard.analysis.incident import Incident

_COLLECTIVES = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "broadcast")  # those that write what they are given
_AVERAGERS = ("LocalSGD", "PeriodicModelAverager", "HierarchicalModelAverager")


def screen(memory: dict[str, Any], moment: Moment, facts: dict[str, Any], traced: bool) -> bool:
    """Whether the ranks have drifted apart; what was found goes to the incident as its `suspicion`."""
    if not replicas.known:
        return False
    if moment == "before_backward":
        unaveraged_gradients.before_backward()
        return False
    if moment == "after_backward":
        unaveraged_gradients.after_backward()
        return False
    if "suspicion" not in facts:
        facts["suspicion"] = _drift(memory, facts.get("optimizer"))
    return isinstance(facts["suspicion"], replicas.Drift)


def idle(memory: dict[str, Any]) -> bool:
    """There are no ranks to drift apart."""
    return not replicas.known


def _drift(memory: dict[str, Any], optimizer: Any) -> replicas.Drift | None:
    exchanges = memory.setdefault("ddp-exchanges", {})
    exchange = exchanges.get(id(optimizer))
    if exchange is None or exchange.optimizer() is not optimizer:
        options = memory["ledger"].options("GG706")
        ordinal = memory.setdefault("ddp-ordinal", 0)
        exchange = exchanges[id(optimizer)] = replicas.Exchange(ordinal, optimizer, options.every, options.tolerance)
        memory["ddp-ordinal"] += 1
    early = unaveraged_gradients.before_step(optimizer)
    found: replicas.Drift | None = exchange.look() if exchange.due() else None
    if found is None or early is not None:
        return early
    unaveraged_gradients.explain(found)
    return found


def averaged_by_hand(incident: Incident) -> bool:
    """Whether the program brings the ranks together itself, now and then: local SGD, a loop of `all_reduce` over gradients."""
    if any(type(value).__name__ in _AVERAGERS for _, value in incident.names.bindings):
        return True
    for file in user_files(incident):
        tree = module_ast(file)
        for node in ast.walk(tree) if tree is not None else ():
            if not isinstance(node, ast.Call):
                continue
            if last_part(node.func) in _AVERAGERS or last_part(node.func) == "average_parameters":
                return True
            if last_part(node.func) in _COLLECTIVES and any(_of_parameters(argument) for argument in node.args):
                return True
    return False


def _of_parameters(argument: ast.expr) -> bool:
    read = {item.attr for item in ast.walk(argument) if isinstance(item, ast.Attribute)}
    read |= {item.id for item in ast.walk(argument) if isinstance(item, ast.Name)}
    return any(name in ("grad", "data", "p", "w") or "param" in name or "grad" in name or "weight" in name for name in read)
