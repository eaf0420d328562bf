"""`x.detach_()` on a value that the graph had saved: PyTorch's own wording differs, and no version tells of it."""

from __future__ import annotations

import ast
from typing import Any

from gradguard.analysis.graph.walk import walk
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.memory import peel
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.edits import replaced
from gradguard.instrumentation.facts import OpFact
from gradguard.rules.inplace import spans
from gradguard.rules.inplace.reaching_writes import step_scopes
from gradguard.rules.inplace.suspects import Suspect
from gradguard.rules.inplace.write_history import DETACHED, saving_op
from gradguard.torch_compat.private_api import check_saved, node_sequence


def _calls(incident: Incident) -> list[ResolvedSite]:
    found = []
    for scope in step_scopes(incident):
        for call in scope.calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr == "detach_":
                place = Suspect(scope, call, None).place
                if place is not None:
                    found.append(place)
    return found


def detached(incident: Incident, code: str, name: str) -> Diagnosis:
    """The op that had saved the value, and the `detach_()` that the source shows."""
    node = next((node for node, _ in walk(incident.root_nodes) if DETACHED in (check_saved(node) or "")), None)
    seq = -1 if node is None else node_sequence(node)
    op, saved = incident.journal.op_at(seq), incident.place_of_node(seq)
    calls = _calls(incident)
    places: list[ResolvedSite | None] = [*calls] if calls else [None]
    told = [_told(incident, code, name, node, op, saved, place) for place in places]
    return told[0].model_copy(
        update={
            "notes": [f"also detached in place at line {other.line}" for other in calls[1:3]],
            "confidence": "likely" if len(calls) == 1 else "possible" if calls else "certain",
            "alternatives": told[: len(calls)],
        }
    )


def _told(
    incident: Incident, code: str, name: str, node: Any, op: OpFact | None, saved: ResolvedSite | None, place: ResolvedSite | None
) -> Diagnosis:
    variable = (
        dotted(peel(place.call.func.value)[0])
        if place is not None and place.call is not None and isinstance(place.call.func, ast.Attribute)
        else None
    )
    word = f"`{saving_op(node, op)}`" if node is not None else "an operation"
    culprit = None if place is None else place.span(f"detaches `{variable or 'the saved value'}` itself, not a copy", "culprit")
    diff = None
    if (
        place is not None
        and place.source is not None
        and place.call is not None
        and isinstance(place.statement, ast.Expr)
        and variable is not None
    ):
        diff = replaced(place.source, [(place.call, f"{variable} = {place.source.flat(place.call).removesuffix('detach_()')}detach()")])
    return Diagnosis(
        code=code,
        name=name,
        headline=(
            f"`{spans.short(place.text) if place else 'detach_()'}` cuts `{variable or 'a value'}` "
            f"off its graph in place, after {word} had saved it for its backward pass"
        ),
        culprit=culprit,
        related=spans.without(
            spans.compact(
                [
                    None if saved is None else saved.span(f"{word} saved it here for its backward", "saved"),
                    None if incident.place is None else incident.place.span("backward needed it", "backward"),
                ]
            ),
            culprit,
        ),
        explanation=(
            "`detach_()` changes the tensor itself: the graph that had saved it loses the "
            "way on from it. `detach()` gives a new tensor and leaves the graph whole."
        ),
        fixes=[
            Fix(
                title=f"use `{variable or 'x'} = {variable or 'x'}.detach()`, or call `detach_()` only after backward",
                safety="safe",
                patch=diff,
            )
        ],
    )
