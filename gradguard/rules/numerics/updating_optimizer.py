"""Optimizers of the graph at hand: which one, where it was made, where it steps."""

from __future__ import annotations

import ast
from typing import Any

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, at_line, function_def, module_ast, resolve
from gradguard.analysis.program.bindings import assignments_to
from gradguard.core.callsite import CallSite
from gradguard.instrumentation.facts import StepFact
from gradguard.monitors.gradient_ledger import Ledger


def last_step(incident: Incident, leaves: list[Any]) -> tuple[StepFact, Any] | None:
    """The last step of an optimizer that holds any of these parameters, with that optimizer."""
    wanted = {id(leaf) for leaf in leaves}
    owners: dict[int, bool] = {}
    for fact in reversed(incident.journal.steps):
        optimizer = fact.optimizer()
        if optimizer is None:
            continue
        if id(optimizer) not in owners:
            owners[id(optimizer)] = any(id(parameter) in wanted for group in optimizer.param_groups for parameter in group["params"])
        if owners[id(optimizer)]:
            return fact, optimizer
    return None


def made_at(incident: Incident, optimizer: Any) -> ResolvedSite | None:
    """Where an optimizer was made: as seen, else where the variable that holds it is assigned a call."""
    site = _seen(incident, optimizer)
    if site is not None:
        return resolve(site)
    for view in incident.user_frames:
        for name, value in list(view.locals.items()):
            if value is not optimizer:
                continue
            scope = module_ast(view.frame.f_code.co_filename) if view.is_module_level else function_def(view.frame.f_code)
            if scope is None:
                continue
            made = [statement for statement in assignments_to(scope, name) if isinstance(getattr(statement, "value", None), ast.Call)]
            if len(made) == 1:
                return at_line(view.frame.f_code.co_filename, made[0].lineno)
    return None


def _seen(incident: Incident, optimizer: Any) -> CallSite | None:
    ledger = incident.notes.get(Ledger)
    for book in [] if ledger is None else list(ledger.books.values()):
        if book.ref() is optimizer and isinstance(book.made, CallSite):
            return book.made
    return None


def rate(optimizer: Any) -> str:
    """`lr=0.01`, or the several rates."""
    rates = list(dict.fromkeys(float(group["lr"]) for group in optimizer.param_groups if "lr" in group))
    return f"lr={rates[0]:g}" if len(rates) == 1 else "lr=" + "/".join(f"{value:g}" for value in rates[:3])
