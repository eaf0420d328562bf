"""When the replicas of a DistributedDataParallel module are compared: at some of an optimizer's steps, right before them."""

from __future__ import annotations

from typing import Any

from gradguard.core.moments import Moment
from gradguard.core.notes import Notes
from gradguard.monitors import unaveraged_gradients
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.probes import replicas


class _Exchanges(dict[int, replicas.Exchange]):
    """By the optimizer's id; `made` numbers them alike on every rank."""

    made = 0


def screen(notes: Notes, moment: Moment, facts: dict[str, Any], traced: bool) -> bool:
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
        facts["finding"] = _drift(notes, facts.get("optimizer"))
    return isinstance(facts["finding"], (replicas.Drift, replicas.Alike))


def idle(notes: Notes) -> bool:
    """There are no ranks to drift apart."""
    return not replicas.known


def _drift(notes: Notes, optimizer: Any) -> replicas.Drift | replicas.Alike | None:
    exchanges = notes[_Exchanges]
    exchange = exchanges.get(id(optimizer))
    if exchange is None or exchange.optimizer() is not optimizer:
        options = notes[Ledger].options("GG706")
        exchange = exchanges[id(optimizer)] = replicas.Exchange(exchanges.made, optimizer, options.every, options.tolerance)
        exchanges.made += 1
    batch = unaveraged_gradients.batch(optimizer)
    early = unaveraged_gradients.before_step(optimizer)
    found: replicas.Drift | replicas.Alike | None = exchange.look(batch) if exchange.due() else None
    if found is None or early is not None:
        return early
    if isinstance(found, replicas.Drift):
        unaveraged_gradients.explain(found)
    return found
