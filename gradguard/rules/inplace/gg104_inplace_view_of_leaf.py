"""# GG104 inplace-view-of-leaf

## What it is
An in-place operation on a view (a slice, an index, `view(-1)`, a transpose) of a leaf tensor that requires grad: `w[0] = 0`.

## Why it is wrong
The view shares the leaf's memory, so the write changes the leaf itself, whose value of the forward pass the gradient belongs
to. PyTorch refuses, as it does for the leaf (GG103).

## Example
    self.weight = nn.Parameter(torch.randn(10, 4))
    self.weight[0] = 0.0

## Use instead
    with torch.no_grad():
        self.weight[0] = 0.0

or fill the tensor first and set `requires_grad_()` afterwards; or `torch.where(mask, 0.0, weight)` where the change shall be
part of the graph.

## Fix safety
`no_grad` is safe for initialisation and for updates.

## When it speaks, what silences it
Only for PyTorch's exception.
"""

from __future__ import annotations

from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.rules.base import Rule
from gradguard.rules.inplace.refused import Refused
from gradguard.rules.inplace.repairs import under_no_grad

CODE, NAME = "GG104", "inplace-view-of-leaf"


def recognise(incident: Incident) -> Diagnosis | None:
    """The write, the view and the leaf under it."""
    write = Refused(incident)
    source = write.chain[-1].base if write.chain else write.written
    what = write.state.full if write.state is not None else source
    leaf = "parameter" if write.state is not None or isinstance(write.value_of(source), nn.Parameter) else "leaf"
    through = f" through the view `{write.written}`" if write.written and write.chain and write.chain[0].call != "argument" else ""
    named = f"`{what}`, a {leaf} that requires grad," if what else f"a {leaf} that requires grad"
    culprit = write.culprit(f"writes into the memory of `{what or 'the leaf'}`{through} while grad mode is on")
    origin = write.made(source, f"`{source}` is made here, as a leaf") if source and write.state is None else None
    place = write.place
    fixes = [
        Fix(
            title="write under `torch.no_grad()`",
            safety="safe",
            patch=None if place is None or write.module is not None else under_no_grad(place),
            detail="right for initialising, masking or updating a parameter",
        ),
        Fix(title="fill the tensor first and call `requires_grad_()` on it afterwards", safety="manual")
        if leaf == "leaf"
        else Fix(
            title=f"make a new tensor with `torch.where` from `{what or source}`, where the change shall be part of the graph",
            safety="manual",
        ),
        Fix(
            title=f"write into a copy: `{source or 'x'}.clone()`",
            safety="unsafe",
            detail="the leaf keeps its value and still gets its gradient",
        ),
    ]
    part = write.feeds_the_graph
    if part:  # without grad mode, what is written would be cut off from all it was computed from
        fixes = [*fixes[2:], *fixes[1:2]]
    elif part is None:
        fixes = [*fixes[2:], *fixes[1:2], fixes[0].model_copy(update={"safety": "manual", "patch": None})]
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"{write.text} writes into {named}{through} outside of `torch.no_grad()`",
        culprit=culprit,
        related=write.related(culprit, *write.alias_spans(), origin, write.helper()),
        tensors=write.facts(),
        explanation=(
            "Indexing and `view` share the leaf's memory, so this write would change "
            "the leaf itself; its gradient belongs to the value it had before."
        ),
        fixes=fixes,
        avoid=["`.data`: it hides the write from autograd, also where a pending backward still needs the old value"],
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="A view of a leaf that requires grad was changed in place.",
    recognise=recognise,
    priority=11,
    messages=(
        "a view of a leaf variable that requires grad is being used in an in-place",
        "a view of a leaf variable that requires grad has been used in an in-place",
    ),
)
