"""Finds the missing term of a second derivative: a value that a custom forward computed and kept on ctx as an attribute.

Two backward calls are needed to know it. At the first, made with `create_graph=True`, the custom Functions in the graph are
looked through for such attributes; at the next, whether its graph has nodes that the first one recorded. What is
remembered between the two is text and numbers, never a tensor.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

import torch

from gradguard.analysis.graph.walk import walk
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.custom_functions import FunctionView, view_of
from gradguard.analysis.places.source import dotted, resolve
from gradguard.analysis.program.expressions import last_part, reads
from gradguard.analysis.program.index import program_of
from gradguard.analysis.program.provenance import Spot, operands_of
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan, TensorFacts
from gradguard.core.notes import Notes
from gradguard.torch_compat.private_api import ACCUMULATE_SEQ, sequence_number

_MOST_NODES = 20_000
_MOST_LOOKS = 8  # of an untraced run: the graph of a gradient penalty has the same Functions in every step

# functions whose results do not change with their inputs, except in jumps: their derivative is zero, and nothing is missing
_STEPS = {
    "gt",
    "lt",
    "ge",
    "le",
    "eq",
    "ne",
    "__gt__",
    "__lt__",
    "__ge__",
    "__le__",
    "__eq__",
    "__ne__",
    "greater",
    "less",
    "greater_equal",
    "less_equal",
    "sign",
    "sgn",
    "round",
    "floor",
    "ceil",
    "trunc",
    "argmax",
    "argmin",
    "argsort",
    "isfinite",
    "isnan",
    "isinf",
    "logical_not",
    "logical_and",
    "logical_or",
    "signbit",
    "heaviside",
    "zeros_like",
    "ones_like",
    "rand_like",
    "randn_like",
    "empty_like",
    "bernoulli",
    "searchsorted",
    "bucketize",
    "new_zeros",
    "new_ones",
    "new_empty",
    "new_full",
    "full_like",
    "randint_like",
    "numel",
    "one_hot",
    "detach",
    "multinomial",
    "masked_fill",
}


@dataclass
class _Suspect:
    cls: type
    attribute: str
    shape: tuple[int, ...]
    certain: bool


@dataclass
class _Recorded:
    """A backward pass that was recorded, and what it went through."""

    first: int  # sequence numbers of the nodes it made
    last: int
    suspects: list[_Suspect] = field(default_factory=list)
    site: Any = None


@dataclass
class _State:
    recorded: list[_Recorded] = field(default_factory=list)
    open: _Recorded | None = None
    looks: int = 0
    said: set[tuple[type, str]] = field(default_factory=set)


def screen(notes: Notes, moment: str, facts: dict[str, Any], traced: bool) -> bool:
    """Whether anything here can matter: a gradient that is made to be differentiated again, or one made so before."""
    call = facts.get("call")
    return _State in notes or (call is not None and call.create_graph)


def idle(notes: Notes) -> bool:
    """Nothing was made to be differentiated again; a call that does so is no calm one."""
    return _State not in notes


def watch(incident: Incident) -> Diagnosis | None:
    """At each backward call: remembers recorded passes, and speaks when a recorded gradient is differentiated."""
    call = incident.call
    if call is None:
        return None
    state = incident.notes.get(_State)
    if incident.moment == "after_backward":
        if state is not None and state.open is not None and state.open.first == call.seq:
            state.open.last = sequence_number()
            state.open = None
        return None
    if state is None:
        if not call.create_graph:
            return None
        state = incident.notes[_State]
    diagnosis = _differentiated(incident, state) if state.recorded else None
    if call.create_graph and (incident.traced or state.looks < _MOST_LOOKS):
        state.looks += not incident.traced
        suspects = _suspects(incident, state.said)
        if suspects:
            state.open = _Recorded(call.seq, call.seq, suspects, call.site)
            state.recorded = [*state.recorded[-7:], state.open]
    return diagnosis


def _suspects(incident: Incident, said: set[tuple[type, str]]) -> list[_Suspect]:
    found: dict[tuple[type, str], _Suspect] = {}
    for node, _ in walk(incident.root_nodes, limit=_MOST_NODES):
        cls = getattr(node, "_forward_cls", None)
        if not isinstance(cls, type) or not any(source is not None for source, _ in node.next_functions):
            continue
        for name, value in list(getattr(node, "__dict__", {}).items()):
            if (cls, name) in found or (cls, name) in said or not isinstance(value, torch.Tensor) or value.requires_grad:
                continue
            if not (value.is_floating_point() or value.is_complex()):
                continue
            verdict = _computed_from_inputs(incident, view_of(cls), node, name, value)
            if verdict is not None:
                found[cls, name] = _Suspect(cls, name, tuple(value.shape), verdict)
    return list(found.values())


def _computed_from_inputs(incident: Incident, view: FunctionView, node: Any, name: str, value: torch.Tensor) -> bool | None:
    """True: the trace saw it being computed from differentiable inputs; False: the source says so; None: neither, or a constant."""
    spot = store_spot(view, name)
    if spot is None or not isinstance(spot.node, ast.expr) or not _used_smoothly(view, name):
        return None
    inputs = _differentiable(view, node)
    if not _depends(view, spot.node, inputs):
        return None
    if incident.journal.op_at(int(node._sequence_nr())) is None:
        return False
    cut = incident.journal.cut_of(value)
    return True if cut is not None and any(root.func not in _STEPS for root in cut.roots()) else None


def _differentiable(view: FunctionView, node: Any) -> set[str]:
    """Forward's inputs that a gradient is wanted for. A node has edges for tensors only, which mostly come before other arguments."""
    edges = [source is not None for source, _ in node.next_functions]
    if len(edges) > len(view.inputs):
        return set()
    kept = getattr(node, "__dict__", {})
    plain = {name for name in view.inputs if name in kept and not isinstance(kept[name], torch.Tensor)}
    tensors = view.inputs if len(edges) == len(view.inputs) else [name for name in view.inputs if name not in plain]
    return {name for name, wanted in zip(tensors, edges, strict=False) if wanted}


def store_spot(view: FunctionView, name: str) -> Spot | None:
    """`ctx.name = expression` in forward (or setup_context)."""
    scope = view.forward
    program = None if scope is None else program_of(scope.source)
    writes = (
        []
        if program is None or scope is None
        else [each for each in program.writes(name) if program.source.stands_in(each.node, scope.tree)]
    )
    stored = next((each.value for each in writes if each.owner is not None and dotted(each.owner) == view.context), None)
    return None if scope is None or stored is None else Spot(scope, stored, name)


def _depends(view: FunctionView, node: ast.expr, inputs: set[str], depth: int = 0) -> bool:
    """Whether an expression computes smoothly from forward's inputs, by its source."""
    if depth > 12 or view.forward is None:
        return False
    if isinstance(node, ast.Attribute):
        return node.attr in ("T", "mT", "real") and _depends(view, node.value, inputs, depth + 1)
    if isinstance(node, (ast.Compare, ast.Constant)):
        return False
    if isinstance(node, ast.Name):
        if node.id in inputs:
            # the bare input itself is no intermediate; inside an expression it is what the expression is computed from
            return depth > 0
        program = program_of(view.forward.source)
        values = [each.value for each in program.reaching(node) if each.value is not None] if program is not None else []
        return any(_depends(view, value, inputs, depth + 1) for value in values if not isinstance(value, ast.Name))
    if isinstance(node, ast.Call):
        called = last_part(node)
        if called in _STEPS or called in ("float", "bool", "long", "int", "size", "item", "len", "to", "type", "contiguous", "clone"):
            operand = next(iter(operands_of(node, view.forward)), None)
            return (
                called in ("float", "to", "contiguous", "type")
                and operand is not None
                and not isinstance(operand, ast.Name)
                and _depends(view, operand, inputs, depth + 1)
            )
    return any(_depends(view, operand, inputs, depth + 1) for operand in operands_of(node, view.forward))


def _used_smoothly(view: FunctionView, name: str) -> bool:
    """Whether backward computes with the attribute (not merely compares it or asks its shape)."""
    return any(_is_computed_with(use) for use in _uses(view, name))


def _is_computed_with(use: Spot) -> bool:
    parents = use.scope.source.parents
    above = parents.get(use.node)
    if isinstance(above, ast.Attribute):
        return isinstance(parents.get(above), ast.Call)
    return not isinstance(above, ast.Compare)


def _differentiated(incident: Incident, state: _State) -> Diagnosis | None:
    """Speaks when this call's graph holds nodes that a remembered pass recorded."""
    live = [entry for entry in state.recorded if entry.suspects and entry.first < entry.last]
    if not live:
        return None
    for node, _ in walk(incident.root_nodes, limit=_MOST_NODES):
        seq = int(node._sequence_nr())
        if seq >= ACCUMULATE_SEQ:
            continue
        for entry in live:
            if entry.first <= seq < entry.last:
                suspect = entry.suspects.pop(0)
                if (suspect.cls, suspect.attribute) not in state.said:
                    state.said.add((suspect.cls, suspect.attribute))
                    return _diagnosis(incident, entry, suspect)
                break
    return None


def _diagnosis(incident: Incident, entry: _Recorded, suspect: _Suspect) -> Diagnosis | None:
    view = view_of(suspect.cls)
    spot = store_spot(view, suspect.attribute)
    if spot is None:
        return None
    context = view.context or "ctx"
    statement = spot.statement
    culprit = Spot(spot.scope, statement or spot.node).span(
        f"`{suspect.attribute}` is kept on {context}: a constant for the second derivative", "culprit"
    )
    related: list[SourceSpan] = []
    for use in _uses(view, suspect.attribute)[:1]:
        related.append(use.span(f"backward computes with `{context}.{suspect.attribute}`", "context"))
    made = resolve(entry.site)
    if made is not None:
        related.append(made.span("the gradient is recorded here (`create_graph=True`)", "made"))
    place = incident.place
    if place is not None and (made is None or place.line != made.line):
        related.append(place.span("and differentiated again here", "backward"))
    target = _target(incident)
    result = f"`{target}`" if target else "the second derivative"
    arguments = ", ".join(f"`{name}`" for name in view.inputs[:1]) or "the input"
    return Diagnosis(
        code="GG407",
        name="function-contract",
        severity="warning",
        headline=f"`{view.name}` keeps `{suspect.attribute}` on {context} as a plain attribute, so {result} misses the term that "
        f"comes from its dependence on {arguments}.",
        culprit=culprit,
        related=related,
        tensors=[TensorFacts(name=f"{context}.{suspect.attribute}", shape=list(suspect.shape), requires_grad=False)],
        explanation="Forward runs without recording, so what it computes and keeps as an attribute is a constant for autograd. "
        "The first derivative is right. "
        f"When the backward of `{view.name}` is itself differentiated, `{context}.{suspect.attribute}` has no path back to "
        f"{arguments}, and its share of the second derivative is silently left out.",
        notes=[] if suspect.certain else ["Read from the source; this step was not traced."],
        fixes=[
            Fix(
                title=f"save {arguments} with `{context}.save_for_backward` and recompute `{suspect.attribute}` in backward from "
                f"`{context}.saved_tensors`",
                detail=f"`{suspect.attribute} = {spot.text}` then stands in backward, where it is recorded.",
            ),
            Fix(title="mark backward with `@once_differentiable` if no second derivative is meant: it then fails instead of being wrong"),
        ],
        avoid=[f"Saving `{suspect.attribute}` itself with save_for_backward: it is neither input nor output, and stays a constant."],
        confidence="certain" if suspect.certain else "likely",
    )


def _uses(view: FunctionView, name: str) -> list[Spot]:
    """The places where backward reads the attribute."""
    scope = view.backward
    parameters = [] if scope is None else scope.parameters()
    return [Spot(scope, read) for read in reads(scope.tree, f"{parameters[0]}.{name}")] if scope is not None and parameters else []


def _target(incident: Incident) -> str | None:
    """What the result of the second call goes to: the first assignment on the way out."""
    for view in incident.user_frames:
        place = resolve(view.site)
        if place is None:
            continue
        if place.targets:
            return place.targets[0]
        if not place.returned:
            return None
    return None
