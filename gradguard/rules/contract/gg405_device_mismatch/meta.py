"""GG405, tensors on the meta device: they have a shape and no memory, so moving the others there is no cure."""

from __future__ import annotations

import ast

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import short_list
from gradguard.analysis.places.source import ResolvedSite, at_line
from gradguard.analysis.program.expressions import argument, inside, is_constant
from gradguard.analysis.program.index import calls_in
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Diagnosis, Fix, TensorFacts


def told(incident: Incident, place: ResolvedSite, tensors: list[torch.Tensor]) -> Diagnosis:
    """Which parameters have no memory, and the only place that makes tensors on meta, if there is one."""
    unique = {id(t): t for t in tensors if t.device.type == "meta"}.values()
    empty = [(state, t) for t in unique if (state := incident.names.state(t)) is not None]
    names = list(dict.fromkeys(state.full for state, _ in empty))
    owners = list(dict.fromkeys(state.full.rpartition(".")[0] for state, _ in empty))
    subject = short_list(names) if names else "a tensor"
    found = {(source.filename, call.lineno) for source, call in _makers(incident.sources)}
    made = at_line(*found.pop()) if len(found) == 1 else None
    call = place.span("needs the values", "culprit" if made is None else "context")
    whole = f"`{owners[0]}`" if len(owners) == 1 else "the module"
    return Diagnosis(
        code="GG405",
        name="device-mismatch",
        headline=f"{subject} {'are' if len(names) > 1 else 'is'} on the meta device: {'they have' if len(names) > 1 else 'it has'} "
        "a shape and no values to compute with.",
        culprit=call if made is None else made.statement_span("what is made here has no memory", "culprit"),
        related=[] if made is None else [call],
        tensors=[TensorFacts(name=state.full, kind="parameter", shape=list(t.shape), device="meta") for state, t in empty[:4]],
        explanation="Tensors on `meta` describe shapes only (for building large models before their weights are loaded). "
        "Moving the other operands there gives a result without values.",
        fixes=[
            Fix(
                title=f"make {whole} outside of the meta device, or give it memory with `.to_empty(device=...)` and load or initialise "
                "its weights, before the optimizer is made",
                safety="manual",
            )
        ],
        avoid=["`.to(device)` on a tensor that is on meta: there is nothing to copy"],
        confidence="certain" if made is not None else "likely",
    )


def _makers(sources: list[Source]) -> list[tuple[Source, ast.Call]]:
    """The calls that ask for the meta device: `torch.device("meta")`, `device="meta"`, `init_empty_weights()`."""
    asking = [
        (source, call) for source in sources for call in inside(source.tree, ast.Call) if is_constant(argument(call, "device"), "meta")
    ]
    named = [(source, call) for source, call in calls_in(sources, "device", "to") if is_constant(argument(call, "device", 0), "meta")]
    return [*calls_in(sources, "init_empty_weights"), *named, *(each for each in asking if each not in named)]
