"""# GG805 oom-optimizer-state

## What it is
Memory ran out in an optimizer's step: while it made its state, which most optimizers make in their first step, or a copy of all parameters
or gradients, which those that work on all parameters at once make in each.

## Why it is wrong
Adam and AdamW keep two values a parameter beside the parameter and its gradient: four times the model, before any activation.
That the forward and backward of the first step fit says nothing of the second.

## Example
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

## Use instead
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-4)    # a row and a column a matrix

## Fix safety
Another optimizer trains otherwise. `foreach=False` changes nothing but speed.

## When it speaks, what silences it
Where an exception that says that memory could not be had leaves the guard, out of an optimizer's `step()`, its closure apart.
"""

from __future__ import annotations

from typing import Any

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.optimizer_contents import parameters_of
from gradguard.analysis.memory.allocations import Allocation, allocation
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.core.account import size
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.safe_read import attributes, elements, pairs
from gradguard.fixes.edits import replaced, with_argument
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.rules.base import Rule
from gradguard.rules.memory.wording import asked, breakdown, ran_out
from gradguard.torch_compat.private_api import memory_of

CODE, NAME = "GG805", "oom-optimizer-state"


def recognise(incident: Incident) -> Diagnosis | None:
    """What the optimizer was about to make."""
    failed = allocation(incident)
    if failed is None or failed.stepping is None or failed.is_elsewhere:
        return None
    optimizer, _ = failed.stepping
    parameters = [each for each in parameters_of(optimizer) if each.grad is not None]
    state = {id(parameter): held for parameter, held in pairs(attributes(optimizer).get("state"))}
    whole = sum(_bytes(each) for each in parameters)
    if not whole:
        return None
    complete = [each for each in parameters if state.get(id(each))]
    if complete and len(complete) == len(parameters) and _made_at_once(incident):
        return _temporary(incident, failed, optimizer, whole)
    kept = sum(_bytes(value) for each in complete for value in elements(state[id(each)]))
    done = complete[:-1]  # the last one's state may have been made in part
    ratio = sum(_bytes(value) for each in done for value in elements(state[id(each)])) / sum(map(_bytes, done)) if done else 0
    return _making(incident, failed, optimizer, whole, kept, ratio)


def _bytes(value: Any) -> int:
    return sum(nbytes for _, nbytes in memory_of(value)) if hasattr(value, "untyped_storage") else 0


def _made_at_once(incident: Incident) -> bool:
    """Whether it failed in the code that works on all parameters at once."""
    return any(view.code_name.startswith("_multi_tensor_") for view in incident.all_frames)


def _making(incident: Incident, failed: Allocation, optimizer: Any, whole: int, kept: int, ratio: float) -> Diagnosis:
    name, kind = incident.names.optimizer(optimizer), type(optimizer).__name__
    expected = f" of about {size(round(ratio) * whole)}" if round(ratio) >= 1 and kept < round(ratio) * whole else ""
    place, made = incident.place, _maker(incident, optimizer)
    related = [] if made is None else [made.span(f"{kind} keeps state for {size(whole)} of parameters", "declared")]
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"{ran_out(failed)}: `{name}` makes its state{expected} in its first step"
        if not kept or kept < whole * max(ratio, 1)
        else f"{ran_out(failed)} in the step of `{name}`, whose state is {size(kept)}",
        culprit=None if place is None else place.span(f"{asked(failed)} of {kind}'s state could not be had", "culprit"),
        related=related,
        explanation=f"{kind} keeps values for each parameter, and makes them when a parameter is first stepped: {size(kept)} are made, for "
        f"{size(whole)} of parameters that have a gradient. Parameters, gradients and state stay for all of training.",
        notes=breakdown(failed),
        fixes=[
            Fix(
                title="Use an optimizer with less state: `torch.optim.Adafactor` keeps a row and a column a matrix, plain SGD nothing",
                safety="unsafe",
                reason="it trains otherwise",
            ),
            Fix(title="Freeze what need not be trained (`requires_grad_(False)`), or keep the parameters in bfloat16"),
        ],
        avoid=["a smaller batch: the state is as large as the parameters, whatever the batch"],
    )


def _temporary(incident: Incident, failed: Allocation, optimizer: Any, whole: int) -> Diagnosis:
    name, kind = incident.names.optimizer(optimizer), type(optimizer).__name__
    place, made = incident.place, _maker(incident, optimizer)
    related: list[SourceSpan] = [] if made is None else [made.span("works on all parameters at once", "declared")]
    patch = None
    call, source = (None, None) if made is None else (made.call, made.source)
    if source is not None and call is not None and all(word.arg is not None for word in call.keywords):
        given = next((word.value for word in call.keywords if word.arg == "foreach"), None)
        patch = with_argument(source, call, "foreach=False") if given is None else replaced(source, [(given, "False")])
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"{ran_out(failed)}: `{name}` works on all parameters at once, with copies of {size(whole)}",
        culprit=None if place is None else place.span("needs room for intermediate values of all parameters", "culprit"),
        related=related,
        explanation=f"{kind} has its state already. With `foreach` it computes a step of all parameters at once, and every intermediate "
        f"value is as large as all of them: {size(whole)}.",
        notes=breakdown(failed),
        fixes=[
            Fix(
                title="Step parameter by parameter: `foreach=False` where the optimizer is made",
                safety="safe",
                detail="The steps are the same, a little slower.",
                patch=patch,
            )
        ],
    )


def _maker(incident: Incident, optimizer: Any) -> ResolvedSite | None:
    """Where the optimizer is made."""
    book = incident.notes[Ledger].books.get(id(optimizer))
    return None if book is None or book.ref() is not optimizer else resolve(book.made)


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="memory ran out in an optimizer's step, over its state or its intermediate values",
    recognise=recognise,
    priority=6,
)
