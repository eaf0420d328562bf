"""Finds the op that lets no gradient through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradguard.analysis.graph.node_values import GraphValues
from gradguard.analysis.graph.recompute import node_kind, signed
from gradguard.analysis.graph.walk import is_accumulate, walk
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import short_list
from gradguard.analysis.places.source import resolve
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan, TensorFacts
from gradguard.monitors.numerics import DEAD_STEPS, Numbers, Plan
from gradguard.rules.numerics.gg504_vanishing_gradient.outputs import below_targets, last_activation
from gradguard.rules.numerics.gg504_vanishing_gradient.zero_weights import REPAIR, all_zero, set_to_zero
from gradguard.rules.numerics.ranges import number
from gradguard.rules.numerics.spans import Places, expression, module_at
from gradguard.torch_compat.private_api import node_sequence, numpy_reachable, saved_data, saved_slots

_TINY = 1e-6  # a largest derivative below this is as good as none


def _sigmoid(values: GraphValues, node: Any) -> torch.Tensor | None:
    out = values.output(node)
    return None if out is None else (out * (1 - out)).abs()


def _tanh(values: GraphValues, node: Any) -> torch.Tensor | None:
    out = values.output(node)
    return None if out is None else (1 - out * out).abs()


def _relu(values: GraphValues, node: Any) -> torch.Tensor | None:
    out = values.output(node)
    return None if out is None else (out > 0).float()


def _softmax(values: GraphValues, node: Any) -> torch.Tensor | None:
    out = values.output(node)
    return None if out is None else (out * (1 - out)).abs()


def _clamp(values: GraphValues, node: Any) -> torch.Tensor | None:
    value = values.input(node, 0)
    low, high = getattr(node, "_saved_min", None), getattr(node, "_saved_max", None)
    if value is None:
        return None
    inside = torch.ones_like(value, dtype=torch.bool)
    for limit, keeps in ((low, value.ge), (high, value.le)):
        if limit is not None:
            inside &= keeps(limit)
    return inside.float()


def _exp(values: GraphValues, node: Any) -> torch.Tensor | None:
    out = values.output(node)
    return None if out is None else out.abs()


_SLOPES: dict[str, tuple[Callable[[GraphValues, Any], torch.Tensor | None], str]] = {
    "Sigmoid": (_sigmoid, "the sigmoid is saturated: its outputs are all 0 or 1"),
    "Tanh": (_tanh, "the tanh is saturated: its outputs are all -1 or 1"),
    "Relu": (_relu, "the ReLU is dead: its input is nowhere positive"),
    "Threshold": (_relu, "the activation is dead: its input is nowhere above the threshold"),
    "Softmax": (_softmax, "the softmax is saturated: its outputs are all 0 or 1"),
    "Clamp": (_clamp, "everything is clamped: no value lies between the limits"),
    "ClampMin": (_clamp, "everything is clamped: no value lies above the limit"),
    "ClampMax": (_clamp, "everything is clamped: no value lies below the limit"),
    "Hardtanh": (_clamp, "everything is clamped: no value lies between the limits"),
    "Exp": (_exp, "the exponential underflows: its outputs are all 0"),
}
_CURES = {
    "Sigmoid": [
        Fix(title="remove the sigmoid and compute the loss on the raw score (`binary_cross_entropy_with_logits`, least squares, hinge)"),
        Fix(title="keep the scores small: normalise the inputs, lower the learning rate, or scale the last layer down"),
    ],
    "Tanh": [
        Fix(title="keep the arguments small: normalise the inputs, initialise the layer before smaller"),
        Fix(title="use an activation that does not saturate on both sides"),
    ],
    "Relu": [
        Fix(title="lower the learning rate or the bias of the layer before; a ReLU that is never positive does not recover"),
        Fix(title="use `LeakyReLU` or `GELU`, which keep a slope"),
    ],
    "Softmax": [Fix(title="use `log_softmax` with a loss on logits, or divide the scores by a temperature")],
}


def _shared_with_numpy(node: Any) -> bool:
    """Whether numpy can write what the node saved: it may not be what the op computed."""
    saved = (saved_data(slot) for _, slot in saved_slots(node))
    return any(numpy_reachable(data) for data in saved if data is not None)


def saturated(incident: Incident, numbers: Numbers) -> Diagnosis | None:
    """The diagnosis where everything on the way to the far end passes ops whose derivative is nowhere above `_TINY`."""
    plan = numbers.plan
    leaf = plan.sentinel() if plan.sentinel is not None else None
    if leaf is None:
        return None
    values = GraphValues(incident.root_nodes, [tensor for _, tensor in incident.names.tensor_bindings()])
    closed: dict[Any, float] = {}
    for node in values.nodes:
        slope = _SLOPES.get(node_kind(node))
        found = None if slope is None else slope[0](values, node)
        if found is not None and found.numel():
            largest = float(found.max())
            if largest < _TINY and not _shared_with_numpy(node):
                closed[node] = largest
    reached = _reached(incident.root_nodes, closed)
    if not closed or id(leaf) in reached:
        return _squashed(incident, numbers, values, leaf)
    nodes = list(closed)
    behind = [each for each in _leaves_below(nodes) if id(each) not in reached]
    if not behind or _learns_elsewhere(numbers, behind):
        return None  # a margin that is kept, in the loss of a critic: nobody waits for a gradient from here
    places = Places(incident, numbers, values.nodes)
    place = places.of(nodes[0], search=True)
    says = _SLOPES[node_kind(nodes[0])][1]
    alone = node_kind(nodes[0]) == "Softmax" and _of_one(values, nodes[0])
    if alone:
        says = "the softmax runs over a dimension of size 1: its output is always 1"
    last = below_targets(values, nodes[0]) if node_kind(nodes[0]) == "Relu" else None
    names = list(dict.fromkeys(_name(incident, item) for item in behind))
    related: list[SourceSpan] = []
    for node in nodes[1:4]:
        other = places.of(node)
        if other is not None and (place is None or other.line != place.line) and all(span.line != other.line for span in related):
            related.append(other.span("so is this one", "context"))
    if incident.place is not None:
        related.append(incident.place.span("its gradient does not get past the saturated op", "backward"))
    elsewhere = []
    for other_plan in numbers.plans.values():
        if other_plan is not plan and other_plan.zeros >= DEAD_STEPS // 4:
            spot = resolve(other_plan.site)
            if spot is not None:
                related.append(spot.span(f"here too: a gradient of zero for {other_plan.zeros} calls", "backward"))
            more = [_name(incident, item) for item in (ref() for ref in other_plan.leaves) if item is not None]
            elsewhere += [name for name in more if name not in names]
    text = expression(place, nodes[0])
    empty = all_zero(behind) if node_kind(nodes[0]) == "Relu" else []
    zeroed = set_to_zero(incident) if empty else None
    if empty:
        says = f"the weights before it ({short_list([_name(incident, item) for item in empty], 2)}) are all 0"
    size = _size(plan)
    headline = (
        f"No gradient gets through `{text}`: {says}, and {short_list(names, 3)} {'have' if len(names) > 1 else 'has'} not learned for"
        f" {plan.zeros} backward calls."
    )
    trail = ", ".join(number(value) for value in list(plan.losses)[-3:])
    module = module_at(place, incident)
    if last is not None and module is None:
        module = last_activation(incident, behind)
    notes = [f"in the module `{module}`"] if module is not None else []
    if elsewhere:
        notes.append(f"the same holds for {short_list(elsewhere, 4)}")
    notes += [f"the gradient norm followed here: {size}", f"the last losses: {trail}", *places.notes]
    cures = list(_CURES.get(node_kind(nodes[0]), [Fix(title="keep the argument in the range in which the op has a slope")]))
    if alone:
        cures = [Fix(title="give softmax the dimension that is to add up to 1 (`dim=`)")]
    elif empty:
        cures = [REPAIR]
        if zeroed is not None and place is not None:
            related.insert(0, place.span("nothing but zeros comes out here, and no gradient goes through", "context"))
    elif last is not None:
        cures.insert(0, last)
    return Diagnosis(
        code="GG504",
        name="vanishing-gradient",
        severity="warning",
        headline=headline,
        culprit=zeroed.statement_span("sets the weights to 0", "culprit")
        if zeroed is not None
        else None
        if place is None
        else place.span(says, "culprit"),
        related=related,
        tensors=[TensorFacts(name=name, kind="parameter") for name in names[:4]],
        explanation=(
            f"{says[0].upper()}{says[1:]}, for the whole batch, so its largest derivative is {number(max(closed.values()))}. Everything"
            f" before it gets a gradient of (next to) nothing and stays as it is; the last losses were {trail}."
        ),
        notes=notes,
        fixes=cures,
        confidence="certain" if place is not None and not places.notes else "likely",
    )


def _learns_elsewhere(numbers: Numbers, leaves: list[torch.Tensor]) -> bool:
    """Whether one of them stands in the graph of another backward call, whose gradients are not zero."""
    ids = {id(leaf) for leaf in leaves}
    return any(
        plan is not numbers.plan and not plan.zeros and any((leaf := ref()) is not None and id(leaf) in ids for ref in plan.leaves)
        for plan in numbers.plans.values()
    )


_SQUASHING = {"Sigmoid": "at most a quarter", "Tanh": "at most all, and far less away from 0", "Softmax": "at most a quarter"}
_CHAIN = 6


def _squashed(incident: Incident, numbers: Numbers, values: GraphValues, leaf: torch.Tensor) -> Diagnosis | None:
    """The diagnosis of a chain of activations of which none is saturated and which together let nothing through."""
    below: dict[Any, bool] = {}
    for node in reversed(values.nodes):  # oldest first: which nodes lead to the leaf
        below[node] = getattr(node, "variable", None) is leaf
    for node in sorted((node for node in values.nodes if not is_accumulate(node)), key=node_sequence):
        below[node] = any(below.get(source.node, False) for source in values.inputs[node] if source.node is not None)
    chain = [node for node in values.nodes if below[node] and node_kind(node) in _SQUASHING]
    if len(chain) < _CHAIN:
        return None
    plan = numbers.plan
    near = plan.near() if plan.near is not None else None
    places = Places(incident, numbers, values.nodes)
    place = places.of(chain[-1], search=True)
    kind = max((node_kind(node) for node in chain), key=[node_kind(node) for node in chain].count)
    name = _name(incident, leaf)
    related = [incident.place.span("its gradient fades on the way", "backward")] if incident.place is not None else []
    trail = ", ".join(number(value) for value in list(plan.losses)[-3:])
    figures = f"the gradient norm of `{name}` is {number(plan.dead_norm)}" + (
        f"; `{_name(incident, near)}`, next to the loss, gets {number(numbers.norm(near, True) or 0.0)}" if near is not None else ""
    )
    return Diagnosis(
        code="GG504",
        name="vanishing-gradient",
        severity="warning",
        headline=(
            f"The gradient fades to nothing before it reaches `{name}`: it passes {len(chain)} activations ({kind.lower()}) in a row, for"
            f" {plan.zeros} backward calls now."
        ),
        culprit=None if place is None else place.span(f"the first of {len(chain)} {kind.lower()} activations in a row", "culprit"),
        related=related,
        tensors=[TensorFacts(name=name, kind="parameter", shape=list(leaf.shape))],
        explanation=(
            f"A {kind.lower()} lets {_SQUASHING[kind]} of the gradient through; {len(chain)} of them in a row leave less than a billionth."
            f" The layers before them stay as they were initialised; the loss stays at {trail}."
        ),
        notes=[figures, *places.notes],
        confidence="likely",
        fixes=[
            Fix(title="use activations with a slope of 1 (ReLU, GELU, SiLU) between the layers"),
            Fix(title="add residual connections or normalisation between the layers"),
        ],
    )


def _of_one(values: GraphValues, node: Any) -> bool:
    """Whether a softmax has one element to choose from."""
    result, dim = values.output(node), signed(getattr(node, "_saved_dim", None))
    if result is None or not isinstance(dim, int):
        return False
    return result.dim() > 0 and result.shape[dim] == 1


def _size(plan: Plan) -> str:
    before = [norm for norm in plan.norms if norm > 0]
    was = f", {number(max(before))} at most before" if before else ""
    return f"{number(plan.dead_norm)} now{was}"


def _reached(roots: list[Any], closed: dict[Any, float]) -> set[int]:
    """The leaves (by id) that can be reached without passing a closed op."""
    seen: set[Any] = set(roots)
    pending = [node for node in roots if node not in closed]
    found: set[int] = set()
    while pending:
        node = pending.pop()
        if is_accumulate(node):
            found.add(id(node.variable))
            continue
        for source, _ in node.next_functions:
            if source is not None and source not in seen:
                seen.add(source)
                if source not in closed:
                    pending.append(source)
    return found


def _leaves_below(nodes: list[Any]) -> list[torch.Tensor]:
    return [node.variable for node, _ in walk(nodes) if is_accumulate(node) and hasattr(node, "variable")]


def _name(incident: Incident, leaf: torch.Tensor) -> str:
    state = incident.names.state(leaf)
    return state.full if state is not None else incident.names.tensor(leaf) or "a leaf tensor"
