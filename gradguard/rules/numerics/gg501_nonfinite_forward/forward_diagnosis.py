"""The diagnosis of a value that stopped being finite in the forward pass."""

from __future__ import annotations

from typing import Any

import torch

from gradguard.analysis.graph.node_values import GraphValues, health
from gradguard.analysis.graph.recompute import node_kind
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite
from gradguard.core.diagnosis import Diagnosis, Severity, SourceSpan, TensorFacts
from gradguard.monitors.numerics import Numbers
from gradguard.rules.numerics import derived
from gradguard.rules.numerics.bounding import bounded, finitely_masked
from gradguard.rules.numerics.expected_overflow import scaler_in_use
from gradguard.rules.numerics.first_nonfinite import Origin, find_origin
from gradguard.rules.numerics.gg501_nonfinite_forward.divisors import made_of
from gradguard.rules.numerics.gg501_nonfinite_forward.traps import explain
from gradguard.rules.numerics.ranges import kinds, value_range
from gradguard.rules.numerics.spans import Places, expression, module_at, operands_at
from gradguard.torch_compat.private_api import storage_key

_LARGE = 1e3  # an input beyond this is worth a note where something overflowed
_OVERFLOWS = frozenset({"Exp", "Expm1", "Pow", "Mm", "Bmm", "Addmm", "Mul", "Convolution", "Sum", "Cosh", "Sinh", "MseLoss", "Softmax"})


def investigate(incident: Incident, numbers: Numbers, root: torch.Tensor) -> tuple[GraphValues, Origin | None]:
    """The values of a root's graph and where they stopped being finite."""
    node = root.grad_fn
    values = GraphValues([] if node is None else [node], [root, *(tensor for _, tensor in incident.names.tensor_bindings())])
    return values, find_origin(values, root)


def describe(
    incident: Incident,
    numbers: Numbers,
    root: torch.Tensor,
    values: GraphValues,
    origin: Origin,
    subject: str,
    severity: Severity = "warning",
) -> Diagnosis:
    """An op that made the first non-finite value.

    Args:
        root: the value that is not finite.
        subject: what is not finite, in words: "the loss".
    """
    places = Places(incident, numbers, values.nodes)
    place = places.of(origin.node, search=True)
    trap = explain(values, origin)
    found = health(root)
    slope = derived.differentiated(incident.journal, origin.node) if place is None and node_kind(origin.node) == "Div" else None
    text = f"`{expression(place, origin.node)}`" if slope is None else f"the derivative of `{expression(slope, origin.node)}`"
    where = _where(place or slope)
    related = _related(incident, places, values, origin, place, trap.underflowed)
    facts = _facts(incident, values, origin, place)
    notes = places.notes + _inputs(incident, values, origin)
    module = module_at(place, incident)
    if module is not None:
        notes.insert(0, f"in the module `{module}`")
    if not origin.sure and place is not None:
        notes.append("not every operand could be read from the graph; an earlier op may have made the value")
    return Diagnosis(
        code="GG501",
        name="nonfinite-forward",
        severity=severity,
        headline=f"{subject[0].upper()}{subject[1:]} is {kinds(found)}: {text} {trap.what}{where}.",
        culprit=(
            place.span(f"first {kinds(origin.health)}: {trap.what}", "culprit")
            if place is not None
            else None
            if slope is None
            else slope.span("its slope is infinite at 0, and this slope is differentiated again", "culprit")
        ),
        related=related,
        tensors=facts,
        explanation=_why(trap.why, origin, values, place, incident),
        notes=notes,
        fixes=[derived.repair()]
        if slope is not None
        else finitely_masked(places.of(origin.injected), trap.fixes)
        if trap.masked
        else bounded(node_kind(origin.node), place, trap.fixes),
        avoid=trap.avoid,
        confidence="certain" if place is not None and origin.sure and not places.notes else "likely",
    )


def _where(place: ResolvedSite | None) -> str:
    if place is None or place.function == "<module>":
        return ""
    return f" (in `{place.function}`)"


def _why(why: str, origin: Origin, values: GraphValues, place: ResolvedSite | None, incident: Incident) -> str:
    passes = (
        ""
        if incident.error is not None
        else "The GradScaler skips what is not finite in the gradient, step after step; the loss itself does not depend on its scale."
        if scaler_in_use(incident, incident.notes[Numbers])
        else "The gradients of such a loss are NaN unless an op on the way back (`masked_fill`, `where`) puts zeros in their place, and a"
        " weight that is updated with a NaN stays NaN."
    )
    ranges = [f"`{name}` is {text}" for name, text in _operands(values, origin, place)]
    figures = f" Here {', '.join(ranges)}." if ranges else ""
    return f"{why}{figures} {passes}".rstrip()


def _operands(values: GraphValues, origin: Origin, place: ResolvedSite | None) -> list[tuple[str, str]]:
    """The operands by the names they have in the expression, with their ranges, where the two can be matched for sure."""
    # what a library function computes inside is not what it was given
    names = [] if place is None or node_kind(origin.node) == "Where" else place.inner_names
    ranges = [(value_range(tensor)) for slot, tensor in values.input_values(origin.node) if slot.isdigit()]
    if len(names) == len(ranges) == 1 and ranges[0] is not None:
        argument = place.arguments[0] if place is not None and len(place.arguments) == 1 else names[0]
        return [(argument, ranges[0])]
    return []


def _facts(incident: Incident, values: GraphValues, origin: Origin, place: ResolvedSite | None) -> list[TensorFacts]:
    facts = []
    names = operands_at(place, origin.node, len(values.inputs.get(origin.node, [])))
    for position, source in enumerate(values.inputs.get(origin.node, [])[:3]):
        tensor = values.input(origin.node, position)
        if tensor is None:
            continue
        leaf = source.leaf
        state = incident.names.state(leaf) if leaf is not None else _parameter_behind(incident, values, source.node)
        name = state.full if state is not None else names[position] if len(names) > position else None
        facts.append(
            TensorFacts(
                name=name,
                kind="parameter" if state is not None and not state.is_buffer else "tensor",
                shape=list(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                device=str(tensor.device),
                requires_grad=True,
            )
        )
    return facts


_VIEWS = frozenset(
    {"Select", "Slice", "Unbind", "View", "T", "Transpose", "Permute", "Unsqueeze", "Squeeze", "Expand", "Index", "Split", "Alias"}
)


def _parameter_behind(incident: Incident, values: GraphValues, node: Any) -> Any:
    """The parameter that a value is a view of."""
    while node is not None and node_kind(node) in _VIEWS:
        inputs = values.inputs.get(node, [])
        if not inputs:
            return None
        if inputs[0].leaf is not None:
            return incident.names.state(inputs[0].leaf)
        node = inputs[0].node
    return None


def _related(
    incident: Incident, places: Places, values: GraphValues, origin: Origin, culprit: ResolvedSite | None, underflowed: Any
) -> list[SourceSpan]:
    spans: list[SourceSpan] = []

    def add(place: ResolvedSite | None, label: str, role: Any) -> None:
        if place is None or (culprit is not None and (place.file, place.line) == (culprit.file, culprit.line)):
            return
        if all((span.file, span.line) != (place.file, place.line) for span in spans):
            spans.append(place.span(label, role))

    if origin.injected is not None and origin.injected is not origin.node:
        add(places.of(origin.injected), "infinities are put in here", "made")
    if underflowed is not None:
        add(places.of(underflowed), "`exp` underflows to 0 here", "made")
    for position, source in enumerate(values.inputs.get(origin.node, [])[:3]):
        if source.node is None or source.leaf is not None:
            continue
        text = value_range(values.input(origin.node, position))
        add(places.of(source.node), "an operand is made here" + (f": {text}" if text else ""), "made")
    inputs = values.inputs.get(origin.node, [])
    divisor = made_of(culprit) if node_kind(origin.node) == "Div" and all(source.node is None for source in inputs[1:2]) else None
    if divisor is not None:  # no part of the graph
        add(divisor[0], f"the divisor is computed from `{divisor[1]}`", "made")
    if origin.spread is not None:
        add(places.of(origin.spread), "here the infinity becomes NaN", "context")
    add(incident.place, "backward is called on it here" if incident.error is None else "the error surfaced here", "backward")
    return spans


def _inputs(incident: Incident, values: GraphValues, origin: Origin) -> list[str]:
    """Data of unusual size that flows into an op that overflowed."""
    if node_kind(origin.node) not in _OVERFLOWS:
        return []
    above: list[Any] = [origin.node]
    seen: set[Any] = {origin.node}
    notes: list[str] = []
    for node in above:
        for slot, tensor in values.constants.get(node, {}).items():
            if slot in ("mat1", "self", "input", "other") and tensor.dim() > 0 and tensor.is_floating_point():
                finite = tensor[torch.isfinite(tensor)]
                if finite.numel() and float(finite.abs().max()) >= _LARGE:
                    name = _called(incident, tensor)
                    notes.append(
                        f"the data that goes in, {name or 'an input'} of shape {tuple(tensor.shape)}, ranges over {value_range(tensor)}"
                    )
        for source in values.inputs.get(node, []):
            if source.node is not None and source.node not in seen and source.leaf is None:
                seen.add(source.node)
                above.append(source.node)
    return list(dict.fromkeys(notes))[:3]


def _called(incident: Incident, tensor: torch.Tensor) -> str | None:
    """The variables that hold this very data; those with the same elements come first."""
    key = storage_key(tensor)
    same, others = list[str](), list[str]()
    for name, value in incident.names.tensor_bindings():
        if storage_key(value) == key:
            (same if value.shape == tensor.shape and value.data_ptr() == tensor.data_ptr() else others).append(f"`{name}`")
    names = list(dict.fromkeys(same or others))[:2]
    return " / ".join(names) or None
