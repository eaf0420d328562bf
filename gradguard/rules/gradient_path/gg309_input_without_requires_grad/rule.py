"""# GG309 input-without-requires-grad

## What it is
A gradient is asked for with respect to a tensor that does not require grad: `torch.autograd.grad(output, x)`, or `x.grad`
after backward, without `x.requires_grad_(True)` before the forward pass; or `x` was detached or rebuilt since.

## Why it is wrong
Autograd records only operations on tensors that require grad. Afterwards it cannot tell how the output depends on `x`.

## Example
```python
scores = model(x)
saliency = torch.autograd.grad(scores.sum(), x)[0]     # raises
```

## Use instead
```python
x.requires_grad_(True)
scores = model(x)
saliency = torch.autograd.grad(scores.sum(), x)[0]
```

## Fix safety
Manual: the call must come before the forward pass, and be undone where the tensor is used on.

## When it speaks, what silences it
When autograd.grad raises "One of the differentiated Tensors does not require grad", and when `.grad` of a tensor that does
not require grad is used as if it were there.
"""

from __future__ import annotations

import ast

import torch

from gradguard.analysis.history import cut_origins
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.sites import same_place, short
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import uses_of
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.fixes.edits import before, patched
from gradguard.rules.base import Rule
from gradguard.rules.gradient_path import lost_path, missing_grad, wanted, wording
from gradguard.rules.gradient_path.gg309_input_without_requires_grad import misspelt_requires_grad

MESSAGES = ("one of the differentiated tensors does not require grad",)


def recognise(incident: Incident) -> Diagnosis | None:
    """The input that does not require grad, and why."""
    if incident.says(*MESSAGES):
        for index, tensor in enumerate(incident.inputs):
            if isinstance(tensor, torch.Tensor) and not tensor.requires_grad:
                return _diagnose(incident, tensor, wanted.input_text(incident, index), incident.place)
        return None
    missing = missing_grad.missing(incident)
    if missing is None or missing.tensor.requires_grad or not missing.tensor.is_leaf:
        return None
    return _diagnose(incident, missing.tensor, missing.text, missing.place)


def _diagnose(incident: Incident, tensor: torch.Tensor, text: str | None, place: ResolvedSite | None) -> Diagnosis:
    name = text or incident.names.of(tensor) or "the input"
    used_grad = incident.error is not None and not incident.says(*MESSAGES)
    cuts = cut_origins.ranked(incident, cut_origins.of_tensor(incident, tensor)) or wanted.cuts(incident, text)
    made = wanted.made(incident, tensor, text)
    related: list[SourceSpan] = []
    culprit: SourceSpan | None
    asked = (
        f"asks for `{name}.grad`, which was never filled"
        if used_grad
        else f"asks for a gradient with respect to `{name}`, which does not require grad"
    )
    cut = next((origin for origin in cuts if origin.place is not None), None)
    if cut is not None and cut.place is not None and not same_place(cut.place, place):
        culprit = cut.place.span(wording.label(cut), "culprit")
        if place is not None:
            related.append(place.span(asked, "backward"))
        headline = f"`{name}` does not require grad, so there is no gradient with respect to it: {wording.why(cut, name)}"
    else:
        culprit = place.span(asked, "culprit") if place is not None else None
        if made is not None and not same_place(made, place):
            related.append(made.span(f"`{name}` is made here, without requires_grad", "made"))
        headline = f"`{name}` does not require grad, so there is no gradient with respect to it"
    fix = Fix(
        title=f"Call `{name}.requires_grad_(True)` before the forward pass that uses it",
        safety="manual",
        detail="On a tensor that is used elsewhere too, take a copy first: `x = x.detach().clone().requires_grad_(True)`.",
        patch=_marked(place, name, tensor),
    )
    slip = misspelt_requires_grad.attribute(tensor)
    spelt = None if slip is None else misspelt_requires_grad.place(incident, slip)
    if spelt is not None:
        culprit, fix = spelt
        headline = f"`{name}` does not require grad: `{slip}` was set on it, and the switch is called `requires_grad`"
        if place is not None:
            related.append(place.span(asked, "backward"))
    return Diagnosis(
        code="GG309",
        name="input-without-requires-grad",
        headline=headline,
        culprit=culprit,
        related=related,
        tensors=[lost_path.facts(name, tensor)],
        explanation=f"Autograd records only operations on tensors that require grad. `{name}` went through the forward pass as "
        f"plain data, so nothing is known of how the result depends on it.",
        fixes=[fix],
        avoid=[
            "Setting requires_grad after the forward pass does not help: the forward pass must be run again."
            + ("" if used_grad else " `allow_unused=True` would only give None.")
        ],
        notes=[]
        if place is None or not isinstance(place.node, ast.AST)
        else [f"The forward pass must see the very tensor `{short(name, 30)}`, not a copy of it."],
    )


def _marked(place: ResolvedSite | None, name: str, tensor: torch.Tensor) -> str | None:
    """The diff that has a variable require grad before the first statement of the function that reads it."""
    function = None if place is None else place.enclosing_function
    if place is None or place.source is None or not name.isidentifier() or not tensor.is_floating_point():
        return None
    reads = uses_of(function or place.source.tree or ast.Module([], []), name)
    if not reads or isinstance(function, ast.Lambda):
        return None
    first = place.source.statement(reads[0])
    given = function is not None and any(argument.arg == name for argument in function.args.args)
    if first is None or first.lineno >= place.line or (not given and place.enclosing_loops):
        return None
    line = f"{name} = {name}.detach().requires_grad_(True)" if given else f"{name}.requires_grad_(True)"
    return patched(place.source, insert=[before(place.source, first, line)])


RULE = Rule(
    code="GG309",
    name="input-without-requires-grad",
    summary="a gradient is asked for with respect to a tensor that does not require grad",
    recognise=recognise,
    priority=55,
    messages=(*MESSAGES, "nonetype"),
)
