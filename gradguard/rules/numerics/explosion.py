"""Tells a training that blew up over several steps from an op that failed on one batch."""

from __future__ import annotations

import ast
import math
import statistics
from typing import Any

import torch

from gradguard.analysis.graph.node_values import GraphValues
from gradguard.analysis.graph.recompute import node_kind
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan, TensorFacts
from gradguard.core.foreign_exceptions import internal_error
from gradguard.fixes.at_places import put_before, spelt
from gradguard.fixes.edits import replaced
from gradguard.monitors.numerics import Numbers
from gradguard.rules.numerics.first_nonfinite import Origin
from gradguard.rules.numerics.ranges import number
from gradguard.rules.numerics.spans import Places, expression
from gradguard.rules.numerics.updating_optimizer import last_step, made_at, rate

_RUN = 4  # steps in a row in which the loss grew
_GROWTH = 1e6  # over such a run
_FAST, _HUGE = 1e4, 1e4  # over two steps or more (over one, where the weights are out of range), with weights of such a size
_AT_ONCE = 1e6  # growth of the loss in each step
_OUT_OF_RANGE = 1e6  # no trained weight is as large
_JUMP = 50.0  # gradient norm of the last step against the median before
_OVERFLOWING = frozenset(
    {
        "Mm",
        "Bmm",
        "Addmm",
        "Mul",
        "Add",
        "Sub",
        "Pow",
        "Sum",
        "Mean",
        "MseLoss",
        "L1Loss",
        "SmoothL1Loss",
        "HuberLoss",
        "Convolution",
        "Relu",
        "LeakyRelu",
        "Exp",
        "NllLoss",
        "LogSoftmax",
        "Mv",
        "Dot",
        "Tanh",
        "Sigmoid",
        "BinaryCrossEntropyWithLogits",
        "NativeLayerNorm",
        "NativeBatchNorm",
        "Cumsum",
        "Silu",
        "Gelu",
        "Softplus",
        "Div",
        "LinalgVectorNorm",
    }
)


def _slower(title: str, made: ResolvedSite | None, optimizer: Any) -> Fix:
    """A tenth of the learning rate, where it is written as a number where the optimizer is made."""
    call = None if made is None else made.call
    rates = {group.get("lr") for group in optimizer.param_groups}
    if made is None or made.source is None or call is None or len(rates) != 1:
        return Fix(title=title)
    given = [*(keyword.value for keyword in call.keywords if keyword.arg == "lr"), *call.args[1:2]]
    value = given[0] if len(given) == 1 else None
    if not isinstance(value, ast.Constant) or type(value.value) is not float or value.value not in rates:
        return Fix(title=title)
    return Fix(title=title, safety="unsafe", patch=replaced(made.source, [(value, f"{value.value / 10:g}")]))


def _clipping(made: ResolvedSite | None, stepped: ResolvedSite | None) -> Fix:
    """The gradient norm clipped before the step, where what the optimizer was given can be named there."""
    given = made.call.args[0] if made is not None and made.call is not None and made.call.args else None
    patch, parameters = None, "model.parameters()"
    if made is not None and made.source is not None and stepped is not None and stepped.source is made.source:
        clip = spelt(made.source, "torch.nn.utils.clip_grad_norm_")
        named = isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) and given.func.attr == "parameters" and not given.args
        if clip is not None and named and given is not None and made.enclosing_function is stepped.enclosing_function:
            parameters = made.source.flat(given)
            patch = put_before(stepped, f"{clip}({parameters}, 1.0)", parameters)
    title = f"clip the gradient norm between backward and step: `torch.nn.utils.clip_grad_norm_({parameters}, 1.0)`"
    return Fix(title=title, patch=patch, safety="manual" if patch is None else "unsafe")


def growth(losses: list[float]) -> tuple[int, float]:
    """The last run of ever larger losses: its length in steps, and how many times larger its end is than its start."""
    start = len(losses) - 1
    while start > 0 and abs(losses[start - 1]) < abs(losses[start]):
        start -= 1
    if start < 0 or start == len(losses) - 1:
        return 0, 1.0
    first = abs(losses[start])
    return len(losses) - 1 - start, abs(losses[-1]) / first if first > 0 else float("inf")


def diverged(
    incident: Incident, numbers: Numbers, values: GraphValues, origin: Origin | None, root: torch.Tensor | None
) -> Diagnosis | None:
    """The diagnosis of a run that exploded: the loss grew step by step, or the last gradient was far larger than all before."""
    plan = numbers.plan
    kind = "" if origin is None or origin.kind != "op" else node_kind(origin.node)
    if origin is not None and (
        origin.kind == "constant" or (origin.kind == "op" and (kind not in _OVERFLOWING or origin.injected is not None))
    ):
        return None
    losses, norms = list(plan.losses), list(plan.norms)
    steps, factor = growth(losses)
    before = norms[-24:-1]
    usual = statistics.median(before) if len(before) >= 3 else 0.0
    jump = norms[-1] / usual if usual > 0 else 0.0
    leaves = [leaf for node in values.nodes if (leaf := getattr(node, "variable", None)) is not None]
    largest = _largest(incident, leaves)
    wild = bool(largest) and largest[0][1] >= _OUT_OF_RANGE  # then one step is enough: the second one may overflow already
    huge = bool(largest) and largest[0][1] >= _HUGE and steps >= (1 if wild else 2) and factor >= _FAST
    if not numbers.loss_bad and incident.error is None and not wild:
        return None  # a loss that is still finite may be large for its own reasons; weights of such a size have none
    slow = huge or (steps >= _RUN and factor >= _GROWTH)
    if not slow and (jump < _JUMP or (origin is not None and origin.kind == "op" and not _weights_made_it(incident, values))):
        return None
    found = last_step(incident, leaves)
    if found is None:
        return None
    fact, optimizer = found
    name = incident.names.optimizer(optimizer)
    made = made_at(incident, optimizer)
    from gradguard.analysis.places.source import resolve

    stepped = resolve(fact.site)
    places = Places(incident, numbers, values.nodes)
    culprit = (made or stepped) if slow else (stepped or made)
    related: list[SourceSpan] = []
    for place, label, role in (
        (made, f"`{name}` is made here, with {rate(optimizer)}", "declared"),
        (stepped, "every step takes the weights further", "changed"),
        (
            None if origin is None or origin.kind != "op" else places.of(origin.node),
            "here the values left what the dtype can hold",
            "context",
        ),
        (incident.place, "backward is called on the loss here", "backward"),
    ):
        if place is not None and (culprit is None or (place.file, place.line) != (culprit.file, culprit.line)):
            related.append(place.span(label, role))  # type: ignore[arg-type]
    figures = "; ".join(f"`{label}` reaches {number(size)}" for label, size in largest)
    trail = ", ".join(number(value) for value in losses[-6:])
    if slow:
        now = "and goes on growing" if math.isfinite(losses[-1]) and not numbers.loss_bad else "and is no longer finite"
        over = f"over the last {steps} steps" if steps > 1 else "in the last step"
        headline = f"Training diverges: the loss grew {number(factor)} times {over} {now}; `{name}` steps too far ({rate(optimizer)})."
        why = (
            f"The last losses were {trail}: every step of `{name}` ({rate(optimizer)}) overshoots by more than it corrects, so the weights"
            " grow without bound until they leave what the dtype can hold. The op that overflowed first is not to blame."
        )
        fixes = [
            _slower(f"lower the learning rate of `{name}` (now {rate(optimizer)}) by a factor of 10 or more", made, optimizer),
            Fix(
                title="bring inputs and features to a common scale (zero mean, unit variance)",
                detail="the largest step that is stable shrinks with the square of the largest feature",
            ),
            Fix(title="clip the gradient before the step: `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`"),
        ]
        if factor ** (1 / steps) >= _AT_ONCE:  # a smaller rate only puts it off
            fixes = [
                fixes[1].model_copy(
                    update={
                        "title": "bring the values to a common scale: inputs to zero mean and unit variance, sums over many terms to means",
                        "detail": f"the loss was {number(losses[-1 - steps])} before it grew; the largest stable step shrinks with the "
                        "square of the largest feature, once for every layer",
                    }
                ),
                fixes[2],
                fixes[0],
            ]
        label = f"{rate(optimizer)} is far too large here" if culprit is made else "each step overshoots"
    else:
        headline = (
            f"The gradient exploded: its norm was {number(jump)} times larger than usual in the last step, `{name}` applied it unclipped,"
            " and the loss is no longer finite."
        )
        why = (
            f"The gradient norm followed here was about {number(usual)} and then {number(norms[-1])}. Where a signal passes the same"
            " weights many times (a recurrent net over many steps, a deep stack), its gradient can grow by orders of magnitude from one"
            " step to the next; applied as it is it throws the weights far off."
        )
        fixes = [
            _clipping(made, stepped),
            Fix(title=f"lower the learning rate of `{name}` (now {rate(optimizer)})"),
            Fix(title="shorten the chain: truncated back-propagation, gating (LSTM, GRU), normalisation or residual connections"),
        ]
        label = "the exploded gradient is applied here, unclipped"
    origin_word = (
        ""
        if origin is None or origin.kind != "op"
        else f"the first value that is not finite came from `{expression(places.of(origin.node), origin.node)}`"
    )
    return Diagnosis(
        code="GG503",
        name="exploding-gradient",
        severity="warning",
        headline=headline,
        culprit=None if culprit is None else culprit.span(label, "culprit"),
        related=related,
        tensors=[TensorFacts(name=label_, kind="parameter") for label_, _ in largest],
        explanation=why,
        notes=[
            note
            for note in (f"largest weights now: {figures}" if figures else "", f"the last losses: {trail}" if trail else "", origin_word)
            if note
        ],
        fixes=fixes,
        confidence="likely",
    )


def _weights_made_it(incident: Incident, values: GraphValues) -> bool:
    """Whether the overflow comes from the weights: no input of the graph is large."""
    for constants in values.constants.values():
        for slot, tensor in constants.items():
            if slot in ("mat1", "self", "input") and tensor.is_floating_point() and tensor.numel() and tensor.dim():
                finite = tensor[torch.isfinite(tensor)]
                if finite.numel() and float(finite.abs().max()) > 1e4:
                    return False
    return True


def _largest(incident: Incident, leaves: list[Any]) -> list[tuple[str, float]]:
    """The parameters with the largest elements, by name."""
    sizes = []
    for leaf in leaves:
        try:
            finite = leaf.detach()[torch.isfinite(leaf.detach())]
            size = float(finite.abs().max()) if finite.numel() else float("inf")
        except internal_error():
            continue
        state = incident.names.state(leaf)
        sizes.append((state.full if state is not None else incident.names.tensor(leaf) or "a parameter", size))
    return sorted(sizes, key=lambda item: -item[1])[:4]
