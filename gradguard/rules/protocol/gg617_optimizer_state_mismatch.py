"""# GG617 optimizer-state-mismatch

## What it is
`optimizer.load_state_dict()` raises because the saved groups of parameters are not those of the optimizer: one was made with
another list of parameters, or had a group added later. Or `optimizer.step()` raises because the optimizer's state (momentum,
moments) does not have the shapes of its parameters. It was loaded from an optimizer that held its parameters in another order, or
other parameters; or a parameter was given another shape afterwards.

## Why it is wrong
A saved optimizer state names no parameter: `load_state_dict` gives the first saved state to the first parameter, the second to the
second. In another order each parameter gets the state of another one. Where the shapes differ the next step raises; where they happen to
agree it runs, with foreign momentum.

## Example
    optimizer = Adam([*head.parameters(), *encoder.parameters()])     # the run that saved
    ...
    optimizer = Adam(model.parameters())                              # the run that resumes: encoder first
    optimizer.load_state_dict(checkpoint["optimizer"])

## Use instead
    optimizer = Adam([*head.parameters(), *encoder.parameters()])
    optimizer.load_state_dict(checkpoint["optimizer"])

## Fix safety
Manual: the order of the run that saved has to be known.

## When it speaks, what silences it
When `load_state_dict()` of an optimizer refuses the saved groups: the culprit is where the optimizer was made, or the call itself
where groups are added to it later. And when `step()` of one of PyTorch's optimizers raises and a state tensor that is kept for
each element of a parameter has another shape than the parameter. The culprit is the call of `load_state_dict`, or the assignment
to `.data` that changed a parameter's shape.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.syntax import range_of
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan, TensorFacts
from gradguard.core.safe_read import elements, item_of, parameters_in
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.rules import wording
from gradguard.rules.base import Rule
from gradguard.rules.protocol.stepping import stepping
from gradguard.rules.spans import calls_of
from gradguard.torch_compat.private_api import storage_key

CODE, NAME = "GG617", "optimizer-state-mismatch"
# what PyTorch's optimizers keep for each element of a parameter; Adafactor's rows and LBFGS's history have shapes of their own
_LIKE_PARAMETER = (
    "momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg", "sum", "acc_delta", "prev",
    "step_size", "ax",
)  # fmt: skip


_REFUSED = ("different number of parameter groups", "doesn't match the size of optimizer's group")


class Misfit(NamedTuple):
    """A parameter whose state has another shape."""

    position: int
    parameter: torch.Tensor
    key: str
    shape: tuple[int, ...]


def recognise(incident: Incident) -> Diagnosis | None:
    """The optimizer whose step raised, where its state does not fit its parameters."""
    if incident.says(*_REFUSED):
        return _refused(incident)
    optimizer = stepping(incident)
    misfits = [] if optimizer is None else _misfits(optimizer)
    return None if not misfits else _told(incident, optimizer, misfits)


def _refused(incident: Incident) -> Diagnosis | None:
    """`load_state_dict` itself raised: the saved groups are others than those of the optimizer."""
    view = next((view for view in incident.frames if "saved_groups" in view.locals), None)
    optimizer = stepping(incident)
    if view is None or optimizer is None:
        return None
    saved, own = (
        [len(elements(item_of(group, "params"))) for group in elements(groups)]
        for groups in (view.locals["saved_groups"], optimizer.param_groups)
    )
    if saved == own:
        return None
    name, load = incident.names.optimizer(optimizer), incident.place
    book = next((book for book in incident.notes[Ledger].books.values() if book.ref() is optimizer), None)
    made = None if book is None else resolve(book.made)
    added = [source.span(place, "a group is added here", "declared") for source in incident.sources
             for call in calls_of(source, "add_param_group") if (place := range_of(call)) is not None]  # fmt: skip
    loading = None if load is None else load.span("the saved groups do not fit the optimizer as it is here", "context")
    making = None if made is None else made.span(f"makes `{name}` with {_sizes(own)}; saved were {_sizes(saved)}", "culprit")
    late = len(saved) > len(own) and bool(added)  # what the run that saved did after it had made the optimizer
    culprit = loading if late or making is None else making
    others = [making if late else loading, *(added[:2] if late else [])]
    left, missing = _left_out(incident, optimizer), sum(saved) - sum(own)
    absent = wording.listed(left) if 0 < missing == len(left) else ""
    if late:
        fix = f"Call what adds the group (line {added[0].line}) before `load_state_dict`, where the checkpoint was saved after it"
    else:
        fix = f"Make `{name}` of the parameters, and in the groups, that the optimizer of the run that saved had"
    groups = "groups" if len(saved) != len(own) else "numbers of parameters in its groups"
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"`{name}` cannot load the saved state, which has other {groups}: it has {_sizes(own)}, and the saved one {_sizes(saved)}",
        culprit=None if culprit is None else culprit.model_copy(update={"role": "culprit"}),
        related=[other.model_copy(update={"role": "declared"}) for other in others if other is not None and other is not culprit],
        explanation="A saved state names no parameter: `load_state_dict` hands the states out by the places of the parameters in the "
        "groups, so that the groups must be those of the optimizer that was saved."
        + (f" {absent} {'are' if missing > 1 else 'is'} in a module that `{name}` trains, and not in `{name}`." if absent else ""),
        fixes=[
            Fix(title=fix, safety="manual"),
            Fix(
                title="leave `load_state_dict` out, and let the optimizer start anew",
                safety="unsafe",
                detail="The weights are kept; momentum and moments begin at 0 again.",
            ),
        ],
        confidence="certain",
    )


def _sizes(sizes: list[int]) -> str:
    """The groups in words: `2 groups, of 2 and 4 parameters`."""
    if len(sizes) == 1:
        return f"1 group of {sizes[0]} parameter{'s' if sizes[0] != 1 else ''}"
    shown = [str(size) for size in sizes[:4]]
    return f"{len(sizes)} groups, of {', '.join(shown[:-1])} and {shown[-1] if len(sizes) <= 4 else 'more'} parameters"


def _left_out(incident: Incident, optimizer: Any) -> list[str]:
    """The parameters that the optimizer's modules have besides, by name."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    roots = [root for _, root in incident.names.modules if any(id(parameter) in own for parameter in parameters_in(root))]
    outside = {id(each): each for root in roots for each in parameters_in(root) if id(each) not in own}
    return [incident.names.leaf(each) or "?" for each in outside.values()]


def _misfits(optimizer: Any) -> list[Misfit]:
    found: list[Misfit] = []
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for position, parameter in enumerate(parameters):
        state: Any = optimizer.state.get(parameter)
        for key in _LIKE_PARAMETER if type(state) is dict else ():
            value = state.get(key)
            if type(value) is torch.Tensor and tuple(value.shape) != tuple(parameter.shape):
                found.append(Misfit(position, parameter, key, tuple(value.shape)))
                break
    return found


def _told(incident: Incident, optimizer: Any, misfits: list[Misfit]) -> Diagnosis:
    name, first = incident.names.optimizer(optimizer), misfits[0]
    leaf = incident.names.leaf(first.parameter) or f"parameter {first.position}"
    book = next((book for book in incident.notes[Ledger].books.values() if book.ref() is optimizer), None)
    loaded, made = (None, None) if book is None else (resolve(book.loaded), resolve(book.made))
    changed = None if loaded is not None else _reshaped(incident, first.parameter)
    culprit: SourceSpan | None = None
    related: list[SourceSpan] = []
    if loaded is not None:
        culprit = loaded.span("gives each parameter the saved state of the one in its place", "culprit")
        if made is not None:
            related.append(made.span("this optimizer's parameters and their order come from here", "declared"))
    elif changed is not None:
        culprit = changed.statement_span(f"`{leaf}` gets another shape here, and the optimizer keeps its state", "culprit")
    if incident.place is not None:
        related.append(incident.place.span("the update of a parameter meets a state of another shape", "context"))
    grad = first.parameter.grad
    stale = grad if grad is not None and grad.shape != first.parameter.shape else None
    shapes, states = _shapes(optimizer), _shapes(optimizer, misfits)
    permuted = loaded is not None and sorted(shapes) == sorted(states)
    same = [p for group in optimizer.param_groups for p in group["params"] if tuple(p.shape) == first.shape]
    whose = incident.names.leaf(same[0]) if permuted and len(same) == 1 else None
    like = f" (that of `{whose}`)" if whose else ""
    what = f"`{first.key}` of `{leaf}` has shape {list(first.shape)}{like}, and the parameter {list(first.parameter.shape)}."
    if loaded is not None:
        others = "its parameters in another order" if permuted else "other parameters"
        cause = f"it was loaded by position, from an optimizer with {others}"
    else:
        cause = "the parameter has another shape than when the state was made"
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"The state of `{name}` does not fit its parameters: {cause}",
        culprit=culprit,
        related=related,
        tensors=[
            TensorFacts(name=leaf, kind="parameter", shape=list(first.parameter.shape)),
            TensorFacts(name=first.key, shape=list(first.shape)),
        ],
        explanation=what
        + (
            " A saved state names no parameter: `load_state_dict` hands the states out in the order in which the new optimizer holds its"
            " parameters."
            if loaded is not None
            else " The optimizer keeps its state by parameter, and goes on with what it has."
        )
        + (f" The `.grad` of `{leaf}` is of another shape, too: {list(stale.shape)}." if stale is not None else ""),
        notes=[f"{len(misfits)} parameters have a state of another shape"] if len(misfits) > 1 else [],
        fixes=_fixes(loaded is not None, permuted, name, stale is not None),
        confidence="certain" if culprit is not None else "likely",
    )


def _shapes(optimizer: Any, misfits: list[Misfit] = []) -> list[tuple[int, ...]]:  # noqa: B006
    """The shapes of the parameters, or of the states they have."""
    others = {misfit.position: misfit.shape for misfit in misfits}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [others.get(position, tuple(parameter.shape)) for position, parameter in enumerate(parameters)]


def _reshaped(incident: Incident, parameter: torch.Tensor) -> ResolvedSite | None:
    """The assignment to `.data` that gave the parameter its memory, where it was seen."""
    key = storage_key(parameter)
    facts = [fact for fact in (incident.journal.writes_to(key) if key is not None else ()) if fact.func == "data"]
    return resolve(facts[-1].site) if facts else None


def _fixes(loaded: bool, permuted: bool, name: str, stale: bool) -> list[Fix]:
    if not loaded:
        also = ", and clear their gradients: `.grad = None`" if stale else ""
        return [Fix(title=f"make a new optimizer after the parameters have changed their shapes{also}", safety="unsafe")]
    afresh = Fix(
        title="leave `load_state_dict` out, and let the optimizer start anew",
        safety="unsafe",
        detail="The weights are kept; momentum and moments begin at 0 again.",
    )
    order = Fix(
        title=f"give `{name}` its parameters in the order of the optimizer that was saved: make both by the same function",
        safety="manual",
        detail="The order is that of the list of parameters (and of the groups); `model.parameters()` follows the order of the modules.",
    )
    other = Fix(title="load the state into an optimizer of the model that it was saved with", safety="manual")
    return [order if permuted else other, afresh]


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="the optimizer's state has other shapes than its parameters: loaded in another order, or of another model",
    recognise=recognise,
    priority=45,
    messages=(*_REFUSED, "must match the size of tensor", "doesn't match the broadcast shape", "shape mismatch", "same size", "same shape"),
)
