"""When the replicas of a DistributedDataParallel module are compared: at some of an optimizer's steps, right before them."""

from __future__ import annotations

from typing import Any

from gradguard.core.moments import Moment
from gradguard.monitors import unaveraged_gradients
from gradguard.probes import replicas


def screen(memory: dict[str, Any], moment: Moment, facts: dict[str, Any], traced: bool) -> bool:
    """Whether the ranks have drifted apart; what was found goes to the incident as its `finding`."""
    if not replicas.known:
        return False
    if moment == "before_backward":
        unaveraged_gradients.before_backward(facts.get("roots"))
        return False
    if moment == "after_backward":
        unaveraged_gradients.after_backward()
        return False
    if "finding" not in facts:
        facts["finding"] = _drift(memory, facts.get("optimizer"))
    return isinstance(facts["finding"], (replicas.Drift, replicas.Alike))


def idle(memory: dict[str, Any]) -> bool:
    """There are no ranks to drift apart."""
    return not replicas.known


def _drift(memory: dict[str, Any], optimizer: Any) -> replicas.Drift | replicas.Alike | None:
    exchanges = memory.setdefault("ddp-exchanges", {})
    exchange = exchanges.get(id(optimizer))
    if exchange is None or exchange.optimizer() is not optimizer:
        options = memory["ledger"].options("GG706")
        ordinal = memory.setdefault("ddp-ordinal", 0)
        exchange = exchanges[id(optimizer)] = replicas.Exchange(ordinal, optimizer, options.every, options.tolerance)
        memory["ddp-ordinal"] += 1
    batch = unaveraged_gradients.batch(optimizer)
    early = unaveraged_gradients.before_step(optimizer)
    found: replicas.Drift | replicas.Alike | None = exchange.look(batch) if exchange.due() else None
    if found is None or early is not None:
        return early
    if isinstance(found, replicas.Drift):
        unaveraged_gradients.explain(found)
    return found
