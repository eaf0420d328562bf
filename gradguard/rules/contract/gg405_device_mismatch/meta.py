"""GG405, tensors on the meta device: they have a shape and no memory, so moving the others there is no cure."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import short_list
from gradguard.analysis.places.source import ResolvedSite, at_line
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Diagnosis, Fix, TensorFacts


def told(incident: Incident, place: ResolvedSite, tensors: list[torch.Tensor]) -> Diagnosis:
    """Which parameters have no memory, and the only place that makes tensors on meta, if there is one."""
    unique = {id(t): t for t in tensors if t.device.type == "meta"}.values()
    empty = [(state, t) for t in unique if (state := incident.names.state(t)) is not None]
    names = list(dict.fromkeys(state.full for state, _ in empty))
    owners = list(dict.fromkeys(state.full.rpartition(".")[0] for state, _ in empty))
    subject = short_list(names) if names else "a tensor"
    found = [at for source in incident.sources for at in _makers(source)]
    made = at_line(*found[0]) if len(set(found)) == 1 else None
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


def _makers(source: Source) -> Iterator[tuple[str, int]]:
    """Lines that ask for the meta device: `torch.device("meta")`, `device="meta"`, `init_empty_weights()`."""
    for node in ast.walk(source.tree or ast.Module([], [])):
        if not isinstance(node, ast.Call):
            continue
        given = [*node.args, *(word.value for word in node.keywords if word.arg == "device")]
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
        meta = any(isinstance(value, ast.Constant) and value.value == "meta" for value in given)
        if name == "init_empty_weights" or (meta and (name in ("device", "to") or any(word.arg == "device" for word in node.keywords))):
            yield source.filename, node.lineno
