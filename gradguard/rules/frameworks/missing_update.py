"""A GradScaler that was not updated between two steps of an optimizer: where update() should have run."""

from __future__ import annotations

import ast
from itertools import islice
from typing import Any

from gradguard.analysis.history.follower import Follower
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, resolve, span_of
from gradguard.analysis.program import user_calls
from gradguard.analysis.program.search_scopes import evaluate
from gradguard.analysis.program.syntax import load
from gradguard.core.diagnosis import SourceSpan
from gradguard.core.safe_read import UNKNOWN, peek
from gradguard.instrumentation.facts import StepFact

_STEPS_SEARCHED = 64


def step_before(incident: Incident, place: ResolvedSite) -> StepFact | None:
    """The last step of the optimizer that the refused call was given, if a new backward has run since: its update() is missing.

    Without a backward in between the refused call has the gradients of that very step, and it is the call that is out of order.
    """
    optimizer, scaler = _optimizer(incident, place), _scaler(incident, place)
    state = None if optimizer is None else peek(scaler, "_per_optimizer_states", {}).get(id(optimizer))
    if state is None or any(float(inf) for inf in state.get("found_inf_per_device", {}).values()):  # then that step was left out
        return None
    fact = next((fact for fact in islice(reversed(incident.journal.steps), _STEPS_SEARCHED) if fact.optimizer() is optimizer), None)
    last = incident.journal.backwards[-1] if incident.journal.backwards else None
    return fact if fact is not None and last is not None and last.clock > fact.clock else None


def spans(incident: Incident, step: StepFact, scaler: str) -> list[SourceSpan]:
    """The culprit, and what belongs to it: the one call of update() that was not reached, what leads past it, the step."""
    stepped = resolve(step.site)
    found = [
        (file, call)
        for file, call in user_calls.calls(incident, "update")
        if isinstance(call.func, ast.Attribute) and not call.args and ast.unparse(call.func.value) == scaler
    ]
    if len(found) != 1:
        return [] if stepped is None else [stepped.span(f"no `{scaler}.update()` has come after this step", "culprit")]
    file, call = found[0]
    culprit = span_of(file, call, label="was not reached after the step before", role="culprit")
    past = _past(file, call)
    further = [] if past is None else [span_of(file, past, label="leads past it", role="context")]
    if stepped is not None:
        further.append(stepped.span(f"the step after which `{scaler}` was not updated", "context"))
    return [culprit, *further]


def _past(file: str, call: ast.Call) -> ast.stmt | None:
    """The only `continue`, `break` or `return` under a condition that stands before the call in its own block."""
    source = load(file)
    above = None if source is None else next((node for node in source.ancestors(call) if isinstance(node, ast.stmt)), None)
    parent = None if source is None or above is None else source.parents.get(above)
    block = next((body for body in (getattr(parent, "body", []), getattr(parent, "orelse", [])) if above in body), [])
    ways = [
        inner
        for statement in block[: block.index(above)]
        if isinstance(statement, ast.If)
        for inner in [*statement.body, *statement.orelse]
        if isinstance(inner, (ast.Continue, ast.Break, ast.Return))
    ] if above in block else []  # fmt: skip
    return ways[0] if len(ways) == 1 else None


def _optimizer(incident: Incident, place: ResolvedSite) -> Any:
    call = place.call
    return None if call is None or not call.args else _value(incident, call.args[0])


def _scaler(incident: Incident, place: ResolvedSite) -> Any:
    call = place.call
    return None if call is None or not isinstance(call.func, ast.Attribute) else _value(incident, call.func.value)


def _value(incident: Incident, node: ast.expr) -> Any:
    scope = Follower(incident).live(0)
    value = UNKNOWN if scope is None else evaluate(node, scope)
    return None if value is UNKNOWN else value
