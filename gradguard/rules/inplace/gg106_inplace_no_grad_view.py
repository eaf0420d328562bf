"""# GG106 inplace-no-grad-view

## What it is
A view was made under `torch.no_grad()` (or inference mode) and is changed in place outside of it.

## Why it is wrong
The view has no history, its base may have one. Whether the write shall be part of the graph cannot be told, so PyTorch
refuses.

## Example
    with torch.no_grad():
        head = features[:, :8]
    head.mul_(scale)

## Use instead
Make the view and the write both inside `no_grad` (the write is then no part of the graph), or both outside (it is). A
`clone()` of the view may be written anywhere.

## Fix safety
Manual: the two choices compute different gradients.

## When it speaks, what silences it
Only for PyTorch's exception.
"""

from __future__ import annotations

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, at_line
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.rules.base import Rule
from gradguard.rules.inplace import spans
from gradguard.rules.inplace.aliases import Alias
from gradguard.rules.inplace.multi_base import base_write
from gradguard.rules.inplace.refused import Refused
from gradguard.rules.inplace.repairs import out_of_place, under_no_grad

CODE, NAME = "GG106", "inplace-no-grad-view"
_MODES = ("no_grad", "inference_mode", "set_grad_enabled")


def recognise(incident: Incident) -> Diagnosis | None:
    """The write, the view, and the block it was made in."""
    write = Refused(incident)
    mode = "inference mode" if incident.says("created in inference mode") else "`torch.no_grad()`"
    link = _made_there(write)
    base = None if link is None else link.base
    what = f"`{write.written}`" if write.written else "a view"
    of = f" of `{base}`" if base else ""
    if incident.says("its base or another view of its base"):
        return _base_written(incident, mode)
    place = write.place
    culprit = write.culprit(f"changes {what} in place with grad mode on")
    viewed = f"the view `{link.name}` of `{link.base}`" if link is not None else "the view"
    made_name = f"`{link.name}`" if link is not None else what
    made = [] if link is None else [link.span.model_copy(update={"label": f"{viewed} was made here, under {mode}", "role": "made"})]
    new = None if place is None or write.module is not None else out_of_place(place)
    differentiated = any(isinstance(value, torch.Tensor) and value.requires_grad for value in incident.args[1:])
    fixes = [
        Fix(
            title=f"write under `torch.no_grad()` too, if the change of {what} is not meant to be differentiated",
            safety="manual",
            patch=None if place is None or write.module is not None or differentiated else under_no_grad(place),
        ),
        Fix(title=f"make the view {made_name} outside of {mode}, if it is", safety="manual"),
        Fix(
            title=f"make a new tensor: `{spans.short(new[0], 90)}`" if new else f"write into a copy: `{write.written or 'view'}.clone()`",
            safety="unsafe",
        ),
    ]
    if differentiated:
        fixes[:2] = [
            Fix(
                title=f"make the view {made_name} outside of {mode}, so that the gradient of what is written goes through it",
                safety="unsafe",
            ),
            fixes[0],
        ]
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"{write.text} changes {what}, a view{of} made under {mode}, in place with grad mode on",
        culprit=culprit,
        related=write.related(culprit, *made, *write.alias_spans(), write.helper()),
        tensors=write.facts(),
        explanation=f"A view made under {mode} has no history of its own, while the memory it shares may be part of a graph; "
        "whether this write shall be differentiated cannot be told, so PyTorch refuses.",
        fixes=fixes,
    )


def _made_there(write: Refused) -> Alias | None:
    """The view in the chain that was made in such a block; the only view there is, where the block is not seen."""
    views = [link for link in write.chain if link.call not in ("argument", "detach", "data")]
    for link in views:
        place = at_line(link.span.file, link.span.line)
        if place is not None and any(word in block.text for block in place.enclosing_withs() for word in _MODES):
            return link
    return views[0] if len(views) == 1 else None


def _base_written(incident: Incident, mode: str) -> Diagnosis:
    found = base_write(incident)
    place: ResolvedSite | None = found.place if found is not None else None
    culprit = None if place is None else place.span(f"changes the memory of a view that was made under {mode}", "culprit")
    use = incident.place
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"A view made under {mode} is used after its memory was changed in place with grad mode on",
        culprit=culprit,
        related=spans.without(spans.compact([None if use is None else use.span("the view is used here", "changed")]), culprit),
        explanation=f"A view made under {mode} has no history; after a tracked write to its memory autograd would have to give it one.",
        fixes=[
            Fix(title=f"make the view after the write, or outside of {mode}", safety="manual"),
            Fix(title="use a `clone()` of it", safety="safe"),
        ],
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="A view made under no_grad was changed in place with grad mode on.",
    recognise=recognise,
    priority=12,
    messages=("view was created in no_grad mode and", "view was created in inference mode and", "a view of a view which was created in"),
)
